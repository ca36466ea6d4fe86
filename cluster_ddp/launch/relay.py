"""What the node program shows of its agent and its ranks: their output, and warnings that would otherwise go unseen."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from cluster_ddp.printing import pass_on, say
from cluster_ddp.run.events import WARNING
from cluster_ddp.run.node_log import LogLine

_MAX_WARNINGS = 20  # of one node and attempt, each text once
_MAX_LENGTH = 500
# Lines of this package, but not those in which a rank says why it ends; and Python warnings that this package made.
_OWN = re.compile(r"cluster[-_]ddp: (?!rank \d+)(?P<text>.+)")
_PYTHONS = re.compile(r"\S*/cluster_ddp/\S+\.py:\d+: \w*Warning: (?P<text>.+)")


class Relay:
    """Passes on what torchrun prints, to standard error, and what rank 0 prints if it is one of ours."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def show(self, line: LogLine) -> None:
        """Pass a line on if people are to see it at once."""
        if line.by_torchrun and not self._stderr_is_the_log():
            pass_on(line.text, sys.stderr)
        elif line.rank == 0 and not line.is_error:
            pass_on(line.text, sys.stdout)

    def _stderr_is_the_log(self) -> bool:
        """Whether what this process prints goes to the node's log anyway, as in a local run."""
        try:
            return os.path.samestat(os.fstat(sys.stderr.fileno()), self._log.stat())
        except (OSError, ValueError):
            return False


class RankWarnings:
    """Finds the warnings of this node's ranks, shows each once, and has `record` write an event for it."""

    def __init__(self, record: Callable[..., None], host: str) -> None:
        self._record = record
        self._host = host
        self._said: set[str] = set()

    def take(self, line: LogLine) -> None:
        """Check a line that was printed."""
        if not line.is_error or len(self._said) >= _MAX_WARNINGS:
            return
        found = _OWN.match(line.text) or _PYTHONS.match(line.text)
        if found is None:
            return
        text = found["text"].strip()[:_MAX_LENGTH]
        if text not in self._said:
            self._said.add(text)
            say(f"cluster-ddp: warning (rank {line.rank} on {self._host}): {text}", sys.stdout)
            self._record(WARNING, rank=line.rank, message=text)
