"""What the node program shows of its agent and its ranks."""

from __future__ import annotations

import sys

from cluster_ddp.launch.agent import Agent
from cluster_ddp.launch.ranks import LocalRanks
from cluster_ddp.launch.tail import Tail
from cluster_ddp.printing import pass_on


class Relay:
    """Passes on what torchrun prints, to standard error, and what rank 0 prints if it is one of ours."""

    def __init__(self, agent: Agent, ranks: LocalRanks) -> None:
        self._agent = agent
        self._ranks = ranks
        self._rank_0: Tail | None = None

    def pass_on(self, *, rest: bool = False) -> None:
        """Pass on what is new; with `rest`, now that all have ended, also a last line without an end."""
        for line in self._agent.new_lines():
            pass_on(line, sys.stderr)
        logs = [rank.stdout for rank in self._ranks.seen.values() if rank.rank == 0 and rank.stdout is not None]
        if logs and (self._rank_0 is None or self._rank_0.path != logs[-1]):  # the first, or one restarted since
            self._show_rank_0(rest=True)
            self._rank_0 = Tail(logs[-1])
        self._show_rank_0(rest=rest)

    def _show_rank_0(self, *, rest: bool) -> None:
        for line in self._rank_0.lines(rest=rest) if self._rank_0 else []:
            pass_on(line, sys.stdout)
