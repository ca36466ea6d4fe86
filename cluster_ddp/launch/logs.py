"""Reading log files: following one that grows, and the last lines of one that is complete."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 16384
_TAIL_LINES = 40
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback


class Tail:
    """Reads what is appended to a file, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def lines(self, *, rest: bool = False) -> list[str]:
        """The lines that came since the last call, with `rest` also one without an end; none where there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if rest and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]


def last_lines(path: Path, count: int = _TAIL_LINES) -> list[str]:
    """The last lines of a log file, without empty ones."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_RANK_PREFIX.sub("", line) for line in text.splitlines() if line.strip()][-count:]
