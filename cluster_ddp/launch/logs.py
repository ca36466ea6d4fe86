"""Reading log files: following one that grows, and the last lines of one that is complete."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cluster_ddp.run.reading import open_regular

_MAX_READ = 4 << 20
_MAX_LINE = 64 << 10
_END_OF_LINE = re.compile(rb"\r*\n|\r+(?!\Z)")
_TAIL_BYTES = 16384
_TAIL_LINES = 40
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback


class Tail:
    """Reads what is appended to a file, whole lines at a time; each state of a progress bar counts as a line.

    Attributes
    ----------
    offset
        How much of the file was read, in bytes.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._rest = b""

    def lines(self, *, rest: bool = False) -> list[str]:
        """The lines added since the last call, with `rest` also an unfinished one; none where there is no file.

        Without `rest` at most `_MAX_READ` bytes are read.
        """
        new = self._read()
        *whole, self._rest = _END_OF_LINE.split(self._rest + new)
        while rest and new:
            new = self._read()
            *more, self._rest = _END_OF_LINE.split(self._rest + new)
            whole += more
        if self._rest and (rest or len(self._rest) > _MAX_LINE):
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def _read(self) -> bytes:
        try:
            fd, _ = open_regular(self.path)
            try:
                new = os.pread(fd, _MAX_READ, self.offset)
            finally:
                os.close(fd)
        except OSError:
            return b""
        self.offset += len(new)
        return new


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
