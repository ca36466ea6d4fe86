"""Detects that the run directory was removed or renamed during training, whose work would then be lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 10.0
_GONE_SECONDS = 60.0  # network storage may claim for a while that something does not exist


class RunWatch:
    """Checks from time to time whether the run directory exists.

    Raises
    ------
    OSError
        It is missing from the beginning.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._device = folder.stat().st_dev
        self._clock = clock
        self._next = 0.0
        self._gone_since: float | None = None

    def has_vanished(self) -> bool:
        """Whether it has been missing for a minute, while its storage was there."""
        now = self._clock()
        if now >= self._next:
            self._next = now + _LOOK_SECONDS
            self._gone_since = (self._gone_since or now) if self._is_gone() else None
        return self._gone_since is not None and now - self._gone_since >= _GONE_SECONDS

    def _is_gone(self) -> bool:
        """Whether it is missing; storage that is not mounted, or does not respond, says nothing about the run."""
        try:
            self._folder.lstat()
        except FileNotFoundError:
            return self._storage_is_there()
        except OSError:
            pass
        return False

    def _storage_is_there(self) -> bool:
        try:
            return next(above for above in self._folder.parents if above.exists()).stat().st_dev == self._device
        except OSError:
            return False
