"""Gathers what the ranks and the agent of a node print, from files on the node's own disk into the node's log.

torchrun needs a file for each stream of each rank. These are in a temporary folder of the node, where printing waits
for no network and does not use up the file quota; about once a second, the node program copies new whole lines, marked
with who printed them, to shared storage.

The relay also prints the important part with the node program's own output: torchrun, rank 0, and warnings.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.launch.logs import Tail
from cluster_ddp.launch.torchrun.exits import RankExits
from cluster_ddp.printing import pass_on, say
from cluster_ddp.run.events import WARNING
from cluster_ddp.run.node_log import LogLine
from cluster_ddp.run.storage import Storage, closing, open_append

AGENT_LOG = "agent.log"
_GATHERED = "gathered.json"  # how far each file was copied, for the reaper of a killed node program
_WRITE_SECONDS = 1.0
MAX_WAITING = 4 << 20  # characters that may wait while the storage accepts none
_KEPT_BYTES = 64 << 10  # of what was copied: the end says why a rank died
_FREED_BYTES = 1 << 20  # at a time
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass
class _Source:
    tail: Tail
    rank: int | None
    is_error: bool
    freed: int = 0

    def lines(self, *, rest: bool) -> list[LogLine]:
        by_torchrun = self.rank is None
        return [LogLine(text, self.rank, self.is_error, by_torchrun) for text in self.tail.lines(rest=rest)]

    def free(self) -> None:
        """Free the disk space of what was copied long ago."""
        upto = self.tail.offset - _KEPT_BYTES
        if upto - self.freed >= _FREED_BYTES and _free_beginning(self.tail.path, upto):
            self.freed = upto


class RankOutput:
    """Gathers what the processes of a node print.

    Parameters
    ----------
    log
        The node's log on shared storage.
    folder
        The node's own folder, which torchrun logs to.
    """

    def __init__(self, log: Path, folder: Path) -> None:
        self.log = log
        self.folder = folder
        self.exits = RankExits(folder)
        self._begin_at = self._place_noted()
        self._sources: dict[Path, _Source] = {}
        self._follow(folder / AGENT_LOG, None, is_error=False)
        self._waiting: list[str] = []
        self._next_write = 0.0
        self._failed = False

    @classmethod
    def prepare(cls, log: Path) -> RankOutput:
        """Create the node's log on shared storage and its own folder, both only for their owner.

        Raises
        ------
        OSError
            This node may not write to the run, or has no space on its own disk. Full shared storage is no error: output
            waits until there is space.
        """
        try:
            append(log, b"")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return cls(log, Path(tempfile.mkdtemp(prefix="cluster-ddp-")))

    def gather(self) -> list[LogLine]:
        """Return what was printed since the last call, at most a few MiB of each file."""
        return self._gather(rest=False)

    def rest(self) -> Iterator[LogLine]:
        """Yield what is left once all have ended, also unfinished lines; in pieces, however much it is."""
        while lines := self._gather(rest=False):
            yield from lines
        yield from self._gather(rest=True)

    def _gather(self, *, rest: bool) -> list[LogLine]:
        self.exits.read()
        for started in self.exits.started.values():
            self._follow(Path(started.folder) / "stdout.log", started.rank, is_error=False)
            self._follow(Path(started.folder) / "stderr.log", started.rank, is_error=True)
        if sum(map(len, self._waiting)) > MAX_WAITING:
            self._write()
            if self._waiting:
                return []
        lines = [line for source in self._sources.values() for line in source.lines(rest=rest)]
        self._waiting += [line.marked() for line in lines]
        if self._waiting and (rest or time.monotonic() >= self._next_write):
            self._write()
        return lines

    def remove(self) -> None:
        """Remove the node's own folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _follow(self, file: Path, rank: int | None, *, is_error: bool) -> None:
        if file not in self._sources:
            self._sources[file] = _Source(Tail(file, self._begin_at.get(str(file), 0)), rank, is_error)

    def _write(self) -> None:
        self._next_write = time.monotonic() + _WRITE_SECONDS
        data = "".join(f"{line}\n" for line in self._waiting).encode(errors="replace")
        try:
            append(self.log, data)
        except OSError as error:  # it is retried
            if not self._failed:
                say(f"cluster-ddp: cannot write what the ranks print to {self.log}: {error.strerror or error}")
            self._failed = True
            return
        self._failed = False
        self._waiting = []
        for source in self._sources.values():
            source.free()
        self._note_place()

    def _note_place(self) -> None:
        place = {str(path): source.tail.offset for path, source in self._sources.items()}
        draft = self.folder / f".{_GATHERED}"
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(place))
            draft.replace(self.folder / _GATHERED)

    def _place_noted(self) -> dict[str, int]:
        """Return how far a killed node program had gathered the files; empty in a new folder."""
        with contextlib.suppress(OSError, ValueError):
            place: dict[str, int] = json.loads((self.folder / _GATHERED).read_text())
            return place
        return {}


def append(path: Path, data: bytes) -> None:
    """Append to a log."""
    storage, fd = Storage(), open_append(path)  # opened each time: others see what was written only once it is closed
    with closing(storage, fd):
        storage.write(fd, data)


def _free_beginning(path: Path, length: int) -> bool:
    """Free the space of the first bytes of a file, which then read as zeros; return whether that worked."""
    call = _fallocate()
    if call is None:
        return False
    try:
        with path.open("r+b") as file:
            return bool(call(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, 0, length) == 0)
    except OSError:
        return False


@functools.cache
def _fallocate() -> Any:
    """Return Linux's system call of that name; None elsewhere."""
    try:
        call = ctypes.CDLL(None).fallocate64 if sys.platform == "linux" else None
    except (AttributeError, OSError):
        return None
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call


_MAX_WARNINGS = 20  # per node and attempt, each text once
_MAX_LENGTH = 500
# Lines of this package, except those in which a rank says why it ends; and Python warnings issued by this package.
_OWN = re.compile(r"cluster[-_]ddp: (?!rank \d+)(?P<text>.+)")
_PYTHONS = re.compile(r"\S*/cluster_ddp/\S+\.py:\d+: \w*Warning: (?P<text>.+)")


class Relay:
    """Passes on to standard error what torchrun prints, and those lines of rank 0 that this package prints."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def show(self, line: LogLine) -> None:
        """Pass a line on if people should see it immediately."""
        if line.by_torchrun and not self._stderr_is_the_log():
            pass_on(line.text, sys.stderr)
        elif line.rank == 0 and not line.is_error:
            pass_on(line.text, sys.stdout)

    def _stderr_is_the_log(self) -> bool:
        """Whether this process's output goes to the node's log anyway, as in a local run."""
        try:
            return os.path.samestat(os.fstat(sys.stderr.fileno()), self._log.stat())
        except (OSError, ValueError):
            return False


class RankWarnings:
    """Finds the warnings of this node's ranks, shows each once, and calls `record` to write an event for it."""

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
