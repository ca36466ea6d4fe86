"""The format of a node's log: each line says who printed it, so that the output of one rank can be selected.

A node has one file, `attempts/NNN/node-<N>.log`, for everything that its ranks and its torchrun print, because a large
run would have too many files otherwise. Lines without a mark are the node program's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARKED = re.compile(r"\[(?:rank (?P<rank>\d{1,9})(?P<error> err)?|torchrun)\] ?(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class LogLine:
    """A line of a node's log."""

    text: str
    rank: int | None = None  # global rank; None for torchrun and the node program
    is_error: bool = False  # whether it was printed on standard error; for ranks only
    by_torchrun: bool = False

    def marked(self) -> str:
        """Return the line as it is written to the log."""
        if self.by_torchrun:
            return f"[torchrun] {self.text}"
        return self.text if self.rank is None else f"[rank {self.rank}{' err' if self.is_error else ''}] {self.text}"


def parse_line(line: str) -> LogLine:
    """Parse a line of a node's log."""
    found = _MARKED.fullmatch(line)
    if found is None:
        return LogLine(line)
    if found["rank"] is None:
        return LogLine(found["text"], by_torchrun=True)
    return LogLine(found["text"], int(found["rank"]), is_error=found["error"] is not None)
