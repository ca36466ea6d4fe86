"""The heartbeat file: a few words of memory that a node program shares with its ranks.

The ranks post what they are doing; the node program posts stop requests, which a rank reads in every step without a
system call. Both sides map one small file, in memory if the system has /dev/shm. Every word is an aligned 64-bit
integer with one writer, so no lock is needed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
from pathlib import Path

from cluster_ddp.errors import Cause
from cluster_ddp.launch.processes import existing_signals
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.stopfile import REASONS

# Asks a rank to write the stacks of all its threads (faulthandler.register). The signal is ignored by default, so it is
# harmless to processes that have not registered, and nothing in a rank uses it otherwise. Empty where it does not
# exist.
STACKS_SIGNALS = existing_signals("SIGURG")

_WORD = 8
_MAGIC = int.from_bytes(b"DDPHBT", "big") << 8  # fits a signed word; the lowest byte is the layout's version
_VERSION = 2

# Words of the header and of a slot. Both are 64 bytes, one cache line, so that ranks do not share a line.
_MAGIC_WORD, _SLOTS, _STOP_LEVEL, _STOP_REASON = range(4)
_PID, _RANK, _STEP, _PHASE, _BEAT, _CAUSE = range(6)
_LINE_WORDS = 8
_STACKS = ".stacks-rank"
_CAUSES = tuple(Cause)


class RankSlot:
    """The words of one local rank. The rank writes them, the node program reads them."""

    __slots__ = ("_base", "_beat", "_step", "_words")

    def __init__(self, words: memoryview[int], index: int) -> None:
        self._words = words
        self._base = (1 + index) * _LINE_WORDS
        self._step = self._base + _STEP
        self._beat = self._base + _BEAT

    def claim(self, *, rank: int, pid: int | None = None) -> None:
        """Claim this slot; a restarted rank claims it again."""
        self._words[self._base + _RANK] = rank
        self._words[self._step] = -1
        self._words[self._base + _CAUSE] = 0
        self.set_phase(Phase.STARTING)
        self._words[self._base + _PID] = os.getpid() if pid is None else pid

    def beat(self, step: int) -> None:
        """Report this step as finished."""
        self._words[self._step] = step
        self._words[self._beat] = time.monotonic_ns()

    def set_phase(self, phase: Phase) -> None:
        """Report what the rank is doing now; counts as a sign of life."""
        self._words[self._base + _PHASE] = phase
        self._words[self._beat] = time.monotonic_ns()

    def set_cause(self, cause: Cause) -> None:
        """Report that the rank fails, and why."""
        self._words[self._base + _CAUSE] = _CAUSES.index(cause) + 1

    @property
    def pid(self) -> int:
        """Process id of the rank; 0 if no rank has claimed the slot."""
        return self._words[self._base + _PID]

    @property
    def rank(self) -> int:
        """Global rank; -1 if no rank has claimed the slot."""
        return self._words[self._base + _RANK]

    @property
    def step(self) -> int:
        """The last finished step; -1 before the first."""
        return self._words[self._step]

    @property
    def phase(self) -> Phase:
        return Phase(self._words[self._base + _PHASE])

    @property
    def cause(self) -> Cause | None:
        """Why the rank failed; None if it has not said so."""
        code = self._words[self._base + _CAUSE]
        return _CAUSES[code - 1] if 0 < code <= len(_CAUSES) else None

    @property
    def beat_ns(self) -> int:
        """`time.monotonic_ns()` of the last sign of life; 0 if there was none."""
        return self._words[self._beat]


class HeartbeatFile:
    """The mapped file; made by the node program with `create`, opened by each of its ranks with `open`."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._mapped = mapped
        self._words = memoryview(mapped).cast("q")
        self.slots = tuple(RankSlot(self._words, index) for index in range(self._words[_SLOTS]))

    @classmethod
    def create(cls, path: Path | None = None, *, slots: int) -> HeartbeatFile:
        """Make a heartbeat file with one slot per local rank, readable only by its owner."""
        if path is None:
            shm = Path("/dev/shm")
            folder = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
            path = folder / f"cluster-ddp-{os.getpid()}-{os.urandom(8).hex()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _allocate(fd, (1 + slots) * _LINE_WORDS * _WORD)
            mapped = mmap.mmap(fd, 0)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        finally:
            os.close(fd)
        words = memoryview(mapped).cast("q")
        words[_SLOTS] = slots
        for index in range(slots):
            words[(1 + index) * _LINE_WORDS + _RANK] = -1
            words[(1 + index) * _LINE_WORDS + _STEP] = -1
        words[_MAGIC_WORD] = _MAGIC | _VERSION  # last: the file is complete now
        return cls(path, mapped)

    @classmethod
    def open(cls, path: Path | str) -> HeartbeatFile:
        """Map a heartbeat file that the node program made; raises `ValueError` if it is not one of this version."""
        with Path(path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        if not _is_heartbeat(mapped):
            raise ValueError(f"{path} is not a heartbeat file of this version of cluster_ddp")
        return cls(Path(path), mapped)

    @property
    def stop_level(self) -> int:
        """0: continue. 1: save and end. 2: end now, without evaluating or waiting. Cheap enough for every step."""
        return self._words[_STOP_LEVEL]

    @property
    def stop_reason(self) -> str | None:
        """The reason, one of `stopfile.REASONS`; None without a stop request."""
        code = self._words[_STOP_REASON]
        return REASONS[code - 1] if 0 < code <= len(REASONS) else None

    def post_stop(self, level: int, reason: str) -> None:
        """Ask the ranks to stop; the level of an earlier request is never lowered."""
        self._words[_STOP_REASON] = REASONS.index(reason) + 1
        self._words[_STOP_LEVEL] = max(level, self._words[_STOP_LEVEL])  # last: whoever sees it finds the reason

    def close(self) -> None:
        """Release the mapping; the heartbeat file and its slots cannot be used afterwards."""
        self._words.release()
        self._mapped.close()

    def unlink(self) -> None:
        """Remove the file; ranks that have it open keep their mapping."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def stacks_beside(heartbeat: Path, rank: int) -> Path:
    """Return where a rank writes its stacks: next to the heartbeat, to save a file on shared storage."""
    return Path(f"{heartbeat}{_STACKS}{rank}")


def written_stacks(heartbeat: Path) -> dict[int, Path]:
    """Return the files that ranks have for their stacks, by rank."""
    beginning = f"{heartbeat.name}{_STACKS}"
    found = heartbeat.parent.glob(f"{beginning}*")
    return {int(file.name[len(beginning) :]): file for file in found if file.name[len(beginning) :].isdigit()}


def _is_heartbeat(mapped: mmap.mmap) -> bool:
    if len(mapped) < _LINE_WORDS * _WORD:
        return False
    magic, slots = struct.unpack_from("=2q", mapped)
    return bool(magic == _MAGIC | _VERSION and len(mapped) == (1 + slots) * _LINE_WORDS * _WORD)


def _allocate(fd: int, size: int) -> None:
    """Allocate a file at its full size: a mapped sparse file on a full disk would kill the process with SIGBUS."""
    os.ftruncate(fd, size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
