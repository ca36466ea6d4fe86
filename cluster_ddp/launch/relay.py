"""What the node program shows of its agent and its ranks: their output, and warnings that nobody would see else."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster_ddp.launch.logs import Tail
from cluster_ddp.launch.ranks import LocalRanks, Rank
from cluster_ddp.printing import pass_on, say
from cluster_ddp.run.events import WARNING

_POLL_SECONDS = 5.0  # the logs lie on shared storage
_MAX_WARNINGS = 20  # of one node and attempt, each text once
_MAX_LENGTH = 500
# Lines of this package, but not those in which a rank says why it ends; and Python warnings that this package made.
_OWN = re.compile(r"cluster[-_]ddp: (?!rank \d+)(?P<text>.+)")
_PYTHONS = re.compile(r"\S*/cluster_ddp/\S+\.py:\d+: \w*Warning: (?P<text>.+)")


class Relay:
    """Passes on what torchrun prints, to standard error, and what rank 0 prints if it is one of ours."""

    def __init__(self, agent_log: Path, ranks: LocalRanks) -> None:
        self._agent = Tail(agent_log)
        self._ranks = ranks
        self._rank_0: Tail | None = None

    def pass_on(self, *, rest: bool = False) -> None:
        """Pass on what is new; with `rest`, now that all have ended, also a last line without an end."""
        for line in self._agent.lines(rest=rest):
            pass_on(line, sys.stderr)
        logs = [rank.stdout for rank in self._ranks.seen.values() if rank.rank == 0 and rank.stdout is not None]
        if logs and (self._rank_0 is None or self._rank_0.path != logs[-1]):  # the first, or one restarted since
            self._show_rank_0(rest=True)
            self._rank_0 = Tail(logs[-1])
        self._show_rank_0(rest=rest)

    def _show_rank_0(self, *, rest: bool) -> None:
        for line in self._rank_0.lines(rest=rest) if self._rank_0 else []:
            pass_on(line, sys.stdout)


class RankWarnings:
    """Finds the warnings of this node's ranks, shows each once, and has `record` write an event for it."""

    def __init__(self, ranks: LocalRanks, record: Callable[..., None], host: str) -> None:
        self._ranks = ranks
        self._record = record
        self._host = host
        self._tails: dict[int, tuple[Rank, Tail]] = {}
        self._said: set[str] = set()
        self._next = 0.0

    def poll(self, *, rest: bool = False) -> None:
        """Look for new ones every few seconds; with `rest` now, since the ranks have ended."""
        if not rest and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _POLL_SECONDS
        for pid, rank in self._ranks.seen.items():
            if rank.stderr is not None and pid not in self._tails:
                self._tails[pid] = rank, Tail(rank.stderr)
        for rank, tail in self._tails.values():
            for line in tail.lines(rest=rest):
                self._take(rank, line)

    def _take(self, rank: Rank, line: str) -> None:
        found = _OWN.match(line) or _PYTHONS.match(line)
        if found is None or len(self._said) >= _MAX_WARNINGS:
            return
        text = found["text"].strip()[:_MAX_LENGTH]
        if text not in self._said:
            self._said.add(text)
            say(f"cluster-ddp: warning (rank {rank.rank} on {self._host}): {text}", sys.stdout)
            self._record(WARNING, rank=rank.rank, message=text)
