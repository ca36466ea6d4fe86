"""Determines from shared storage whether the node programs of an attempt are alive, for the keeper.

Each node program creates a file in the attempt, touches it every few seconds, and removes it when it signs off. Slurm
alone does not suffice: if a node was rebooted within SlurmdTimeout, or its slurmstepd was killed, srun waits for its
task forever.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import read_events_of
from cluster_ddp.run.node_outcome import signed_off
from cluster_ddp.run.reading import open_regular
from cluster_ddp.run.storage import open_append

TOUCH_SECONDS = 5.0
SILENT_SECONDS = 60.0  # after another node has signed off; network storage may show a touch half a minute late
SIGNED_OFF_SECONDS = 30.0  # after all have: srun may be waiting for Slurm's controller, which is away
_LOOK_SECONDS = 5.0
_WATCHED_SECONDS = 4 * TOUCH_SECONDS


class SignOfLife:
    """A node program's own file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._next = 0.0

    def give(self) -> None:
        """Touch the file, if it is time to."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TOUCH_SECONDS
            with contextlib.suppress(OSError):  # a full disk must not end training
                fd = open_append(self._file)
                try:
                    os.utime(fd)
                finally:
                    os.close(fd)

    def end(self) -> None:
        """Sign off."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def gives_sign_of_life(attempt: AttemptDirectory, nodes: int) -> bool:
    """Watch for a while whether any node program of an attempt still touches its file."""
    files = [attempt.alive_file(node) for node in range(nodes)]
    before = {file: moment for file in files if (moment := touched_at(file)) is not None}
    deadline = time.monotonic() + _WATCHED_SECONDS
    while before and time.monotonic() < deadline:
        time.sleep(1.0)
        if any(touched_at(file) not in (moment, None) for file, moment in before.items()):
            return True
    return False


def touched_at(file: Path) -> int | None:
    """Return when a file was last touched, in ns by the server's clock; None if it cannot be opened."""
    try:
        return _touched_at(file)
    except OSError:
        return None


def _touched_at(file: Path) -> int:
    fd, _ = open_regular(file)  # a client of network storage asks the server at each opening
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


class SilentNodes:
    """Finds the nodes that no longer give signs of life although others have signed off.

    Parameters
    ----------
    ended
        The nodes that are known to have ended, whether or not they have signed off.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        nodes: int,
        *,
        ended: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt = attempt
        self._files = {node: attempt.alive_file(node) for node in range(nodes)}
        self._known_ended = set(ended)
        self._clock = clock
        self._next = 0.0
        self._began: set[int] = set()
        self._touched: dict[int, tuple[int, float]] = {}  # the file's time, and since when by our own clock
        self._first_end: float | None = None
        self._last_end: float | None = None

    @property
    def all_signed_off(self) -> bool:
        """Whether all nodes had signed off at the last look, and some time ago."""
        return self._last_end is not None and self._clock() - self._last_end > SIGNED_OFF_SECONDS

    @property
    def any_began(self) -> bool:
        """Whether any node had given a sign of life by the last look."""
        return bool(self._began or self._known_ended)

    def look(self) -> list[int]:
        """Return the ranks of the nodes to give up on; empty as long as none has signed off."""
        now = self._clock()
        if now < self._next:
            return []
        self._next = now + _LOOK_SECONDS
        gone = {node for node, file in self._files.items() if not self._there(node, file, now)}
        if gone - self._began - self._known_ended:  # they are not up yet, or have been and gone between two looks
            self._known_ended |= gone & self._signed_off()
        ended = (gone & self._began) | self._known_ended
        if not ended:
            return []
        self._first_end = now if self._first_end is None else self._first_end
        if len(ended) == len(self._files):
            self._last_end = now if self._last_end is None else self._last_end
        return [node for node in self._files if node not in ended and self._silent_for(node, now) > SILENT_SECONDS]

    def _signed_off(self) -> set[object]:
        return signed_off(read_events_of(self._attempt))

    def _there(self, node: int, file: Path, now: float) -> bool:
        try:
            moment = _touched_at(file)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the storage is unavailable: nothing is known
        self._began.add(node)
        if self._touched.get(node, (0, 0.0))[0] != moment:
            self._touched[node] = moment, now
        return True

    def _silent_for(self, node: int, now: float) -> float:
        assert self._first_end is not None
        since = self._touched[node][1] if node in self._touched else self._first_end
        return now - max(since, self._first_end)
