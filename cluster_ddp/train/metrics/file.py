"""Writes metrics.jsonl and other line-based files, on storage that may be full for a while."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.printing import say
from cluster_ddp.run.storage import open_lines

_MAX_KEPT = 1_000_000  # lines; storage that stays full for longer is unlikely to recover


class LineFile:
    """Appends lines, each written to the file at once. Only one process may write to it.

    Lines that cannot be written are kept, and written before the next one that can: a full disk neither loses lines nor
    ends the training. A partial line left by a killed process is terminated first. A file that somebody deletes is
    created again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd, torn_end = open_lines(path)
        self._kept: deque[bytes] = deque([torn_end] if torn_end else [], maxlen=_MAX_KEPT)
        self._refused = False

    def write(self, line: str) -> None:
        """Append a line, passed in without its newline."""
        self._kept.append(line.encode() + b"\n")
        self._pass_on()

    def close(self) -> None:
        """Close the file; report how many lines are lost, if the storage still does not accept them."""
        self._pass_on()
        if self._kept:
            self._say(f"its last {len(self._kept)} lines are lost")
        os.close(self._fd)

    def _pass_on(self) -> None:
        try:
            if os.fstat(self._fd).st_nlink == 0:  # somebody has deleted it
                fd, _ = open_lines(self._path)
                os.close(self._fd)
                self._fd = fd
            while self._kept:
                written = os.write(self._fd, self._kept[0])
                rest = self._kept.popleft()[written:]
                if rest:
                    self._kept.appendleft(rest)
            self._refused = False
        except OSError as error:
            if not self._refused:
                self._say(f"{error.strerror}; its lines are kept until they can be written")
            self._refused = True

    def _say(self, text: str) -> None:
        say(f"cluster-ddp: cannot write {self._path}: {text}")


class MetricsFile:
    """Appends one JSON object per line, flushed at once. Only one process may write to it. A full disk delays lines.

    Usable alone: ``MetricsFile(path, attempt=0).write(step=10, samples=320, epoch=0, values={"train/loss": 0.5})``.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._file = LineFile(path)

    def write(
        self, *, step: int, samples: int, epoch: int, values: Mapping[str, float], measured: float | None = None
    ) -> None:
        """Append a line; a value that is not finite is written as null, since JSON has no such numbers.

        `measured` is the time of the measurement in Unix seconds; by default now.
        """
        row: dict[str, float | None] = {
            "step": step,
            "samples": samples,
            "epoch": epoch,
            "attempt": self._attempt,
            "time": time.time() if measured is None else measured,
        }
        row.update((name, value if math.isfinite(value) else None) for name, value in values.items())
        self._file.write(json.dumps(row))

    def close(self) -> None:
        self._file.close()
