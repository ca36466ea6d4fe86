"""Detects that nothing can be saved any more: the run directory or the attempt's folder in it was removed, or its
storage is unavailable.

An older copy of a run directory that is put in its place holds no folder of an attempt that has begun since.

Storage that is unmounted on one node alone would otherwise let all nodes train on to the end of the job, without a
checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster_ddp.run.directory import AttemptDirectory

_LOOK_SECONDS = 10.0
_GONE_SECONDS = 60.0  # network storage may claim for a while that something does not exist
_AWAY_SECONDS = 900.0  # for somebody to bring it back: a restart without it would fail


class RunWatch:
    """Checks from time to time whether the folder of an attempt exists.

    Raises
    ------
    OSError
        It is missing from the beginning.
    """

    def __init__(self, attempt: AttemptDirectory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = attempt.path
        self._run = attempt.run.path
        self._device = self._folder.stat().st_dev
        self._clock = clock
        self._next = 0.0
        self._gone_since: float | None = None
        self._away_since: float | None = None

    def why_nothing_is_saved(self) -> str | None:
        """Return what has happened to the folder if training should end because of it; None if it may go on.

        It was removed if it is missing for a minute while its storage is there; its storage is given up after longer.
        """
        now = self._clock()
        if now >= self._next:
            self._next = now + _LOOK_SECONDS
            problem = self._problem()
            self._away_since = (self._away_since or now) if problem is not None else None
            gone = isinstance(problem, FileNotFoundError) and self._storage_is_there()
            self._gone_since = (self._gone_since or now) if gone else None
        if self._gone_since is not None and now - self._gone_since >= _GONE_SECONDS:
            return f"{self._folder if self._run.exists() else self._run} was removed or renamed"
        if self._away_since is not None and now - self._away_since >= _AWAY_SECONDS:
            return f"the storage of {self._run} has been unavailable for {_AWAY_SECONDS / 60:.0f} min"
        return None

    def _problem(self) -> OSError | None:
        try:
            self._folder.lstat()
        except OSError as error:
            return error
        return None

    def _storage_is_there(self) -> bool:
        """Whether what holds the run directory is mounted; if not, nothing is known about the run."""
        try:
            return next(above for above in self._folder.parents if above.exists()).stat().st_dev == self._device
        except OSError:
            return False
