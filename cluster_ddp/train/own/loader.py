"""The loader that `ScriptRun.resumable` gives in place of the user's own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator
from typing import Any

from cluster_ddp.train.errors import DataError, TrainError
from cluster_ddp.train.own.batches import Batches
from cluster_ddp.train.own.geometry import Geometry
from cluster_ddp.train.own.loop import Loop

_END = object()


class ResumableLoader:
    """Gives the batches that are left, epoch by epoch, and saves and stops between them.

    Everything else is asked of the user's DataLoader.

    Parameters
    ----------
    loader
        The user's.
    batches
        Its batches, as a function of seed and epoch.
    step
        Steps that are finished.
    """

    def __init__(self, loader: Any, batches: Batches, loop: Loop, geometry: Geometry, step: int) -> None:
        self._loader, self._batches, self._loop, self._geometry = loader, batches, loop, geometry
        self._epoch, within = divmod(step, geometry.steps)
        self._first = within * geometry.accumulate
        if within == 0 and step > 0 and not loop.is_closed:
            # Saved after the last batch of an epoch, before the code that follows the batches.
            self._epoch, self._first = self._epoch - 1, batches.length
        self._is_open = self._is_through = False

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, by number from 0; use it in place of ``range(epochs)``."""
        while self._epoch < self._geometry.epochs:
            self._is_open, self._is_through = True, False
            yield self._epoch
            self._is_open = False
            self._epoch, self._first = self._epoch + 1, 0
            self._loop.jump(self._epoch * self._geometry.steps)

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """Each batch with its number in the epoch; ``enumerate(loader)`` would count from 0 after a resume."""
        return ((number - 1, batch) for batch, number in zip(self, self._numbers(), strict=False))

    def __iter__(self) -> Iterator[Any]:
        """The batches of this epoch that are left."""
        if not self._is_open or self._is_through:
            raise TrainError(
                "the resumable loader is iterated "
                + ("twice in an epoch" if self._is_open else "outside of its epochs")
                + ": `for epoch in loader.epochs():` and in it, once, `for batch in loader:`. For anything else, such "
                "as statistics of the data, keep the DataLoader that was given to resumable()"
            )
        epoch = self._epoch
        length, accumulate = self._batches.length, self._geometry.accumulate
        left = range(self._first, length)
        self._is_through = True
        batches = self._batches.begin(self._epoch, self._first) if left else _none()
        with contextlib.closing(batches):
            for number in left:
                batch = next(batches, _END)
                if batch is _END:
                    raise DataError(
                        f"the DataLoader gave {number} batches in epoch {self._epoch}, and {length} were expected: its "
                        "length has to be right, or given by resumable(..., batches=)"
                    )
                self._first = number + 1
                self._loop.begin(number % accumulate)
                try:
                    yield batch
                except GeneratorExit:
                    if self._is_open and self._epoch == epoch:  # else it was kept beyond its epoch, which is counted
                        self._loop.abandon()
                    raise
                del batch
                if self._first % accumulate == 0 or self._first == length:
                    self._loop.end(last=self._first == length)
        self._loop.rest(self._epoch)

    def __len__(self) -> int:
        return self._batches.length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def close(self) -> None:
        """End the workers."""
        self._batches.close()

    def _numbers(self) -> Iterator[int]:
        return (self._first for _ in itertools.count())


def _none() -> Generator[Any, None, None]:
    yield from ()
