"""What the node program shows of its agent and its ranks."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from cluster_ddp.launch.agent import Agent
from cluster_ddp.launch.ranks import LocalRanks
from cluster_ddp.launch.tail import Tail


class Relay:
    """Passes on what torchrun prints, to standard error, and what rank 0 prints if it is one of ours."""

    def __init__(self, agent: Agent, ranks: LocalRanks) -> None:
        self._agent = agent
        self._ranks = ranks
        self._rank_0: Tail | None = None

    def pass_on(self, *, rest: bool = False) -> None:
        """Pass on what is new.

        Parameters
        ----------
        rest
            Also a last line without an end: all have ended.
        """
        for line in self._agent.new_lines():
            say(line, sys.stderr)
        logs = [rank.stdout for rank in self._ranks.seen.values() if rank.rank == 0 and rank.stdout is not None]
        if logs and (self._rank_0 is None or self._rank_0.path != logs[-1]):  # the first, or one restarted since
            self._show_rank_0(rest=True)
            self._rank_0 = Tail(logs[-1])
        self._show_rank_0(rest=rest)

    def _show_rank_0(self, *, rest: bool) -> None:
        for line in self._rank_0.lines(rest=rest) if self._rank_0 else []:
            say(line, sys.stdout)


def say(line: str, stream: TextIO) -> None:
    """Print a line. A terminal that was closed, or a full disk behind the output, must not end the training."""
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)
