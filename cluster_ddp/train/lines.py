"""Appending lines to a file on storage that may be full for a while."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path

_MOST_KEPT = 1_000_000  # lines; storage that is full for longer than this is not getting better


class LineFile:
    """Appends lines, each handed to the system at once. One process writes it.

    What the storage refuses is kept, and written before the next line that it takes: a full disk costs no line and does
    not end the training. A line that a killed process left half written is ended first.

    Parameters
    ----------
    path
        The file, made if it is not there.

    Raises
    ------
    OSError
        The file cannot be opened. After that nothing is raised.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._kept: deque[bytes] = deque(maxlen=_MOST_KEPT)
        self._refused = False
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._kept.append(b"\n")

    def write(self, line: str) -> None:
        """Append a line, given without its end."""
        self._kept.append(line.encode() + b"\n")
        self._pass_on()

    def close(self) -> None:
        """Close the file; lines that the storage still refuses are lost, and it is said how many."""
        self._pass_on()
        if self._kept:
            self._say(f"{len(self._kept)} lines are lost")
        os.close(self._fd)

    def _pass_on(self) -> None:
        try:
            while self._kept:
                written = os.write(self._fd, self._kept[0])
                rest = self._kept.popleft()[written:]
                if rest:
                    self._kept.appendleft(rest)
            self._refused = False
        except OSError as error:
            if not self._refused:
                self._say(f"{error.strerror}; what belongs there is kept until it can be written")
            self._refused = True

    def _say(self, text: str) -> None:
        print(f"cluster_ddp: cannot write {self._path}: {text}", file=sys.stderr, flush=True)
