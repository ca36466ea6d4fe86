"""The loader that `ScriptRun.resumable` returns, for the loop to use instead of the user's DataLoader."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from cluster_ddp.train.errors import DataError, TrainError
from cluster_ddp.train.own.data.batches import Batches
from cluster_ddp.train.own.geometry import Geometry
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.watch.changed_data import ChangedData
from cluster_ddp.train.own.watch.taking import Taking

_END = object()


class ResumableLoader:
    """Yields the remaining batches, epoch by epoch, and saves and stops between them.

    All other attributes are those of the user's DataLoader.

    Parameters
    ----------
    loader
        The user's DataLoader.
    batches
        Its batches, as a function of seed and epoch.
    step
        Number of finished steps.
    taking
        Watches how the batches are taken.
    changed
        Watches what the code after the batches changes.
    as_now
        Each takes a snapshot and returns a function that restores it. On a resume, code before the first batches may
        change what was restored, for example by loading a snapshot of its own; this undoes the change.
    """

    def __init__(
        self,
        loader: Any,
        batches: Batches,
        loop: Loop,
        geometry: Geometry,
        step: int,
        taking: Taking,
        changed: ChangedData,
        as_now: Sequence[Callable[[], Callable[[], None]]],
    ) -> None:
        self._loader, self._batches, self._loop, self._geometry = loader, batches, loop, geometry
        self._taking, self._changed = taking, changed
        self._put_back = [restored() for restored in as_now] if step else []
        self._given: Callable[[], Any] = lambda: None
        loop.on_update = lambda: taking.update(self._given())
        self._epoch, within = divmod(step, geometry.steps)
        self._first = within * geometry.accumulate
        if within == 0 and step > 0 and not loop.is_closed:
            # Saved after the last batch of an epoch, before the code that follows the batches.
            self._epoch, self._first = self._epoch - 1, batches.length
        self._is_open = self._is_through = self._is_resumed = False

    @property
    def inner(self) -> Any:
        """The user's DataLoader."""
        return self._loader

    def epochs(self) -> Iterator[int]:
        """The remaining epochs, numbered from 0; use it instead of ``range(epochs)``.

        On a resume, code before the loop runs again, and so does code before the batches of an epoch that is resumed
        in the middle; weights and settings that it changes are restored again.
        """
        self._loop.beginning.begin()
        while self._epoch < self._geometry.epochs:
            self._is_open, self._is_through, self._is_resumed = True, False, self._first > 0
            self._loop.enter(self._epoch)
            if not self._first:
                self._restore()
            try:
                yield self._epoch
            finally:
                left = f"epoch {self._epoch} after {self._first} of its {len(self)} batches"
                self._loop.leaving.early = left if self._first < len(self) else None
            self._is_open = False
            # A loop that only leaves the last epoch like this, at its last step, asks for more in the others.
            is_decisive = self._epoch + 1 < self._geometry.epochs or self._geometry.epochs == 1
            if is_decisive and self._first == len(self) and getattr(self._given(), "gi_frame", None) is not None:
                self._taking.tell_of_counting()
            self._changed.end()
            self._epoch, self._first = self._epoch + 1, 0
            self._loop.jump(self._epoch * self._geometry.steps)
        self._loop.after_loop.begin()
        self._loop.rest(self._geometry.epochs)

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Each batch with its number in the epoch; ``enumerate(loader)`` would begin at `start` after a resume."""
        return ((number - 1 + start, batch) for batch, number in zip(self, self._numbers(), strict=False))

    def __iter__(self) -> Iterator[Any]:
        """The remaining batches of this epoch.

        In an epoch resumed in the middle, one more pass yields nothing and is not an error: code that takes
        ``len(loader)`` batches, such as an Ignite engine, starts a second pass and ends the epoch when it is empty.
        """
        batches = self._left()
        self._given = weakref.ref(batches)
        return batches

    def _left(self) -> Generator[Any, None, str | None]:
        if self._is_open and self._is_through and self._is_resumed:
            self._is_resumed = False
            return None
        self._expect_pass()
        self._restore()
        epoch, first = self._epoch, self._first
        length, accumulate = self._batches.length, self._geometry.accumulate
        left = range(self._first, length)
        self._is_through = True
        self._taking.begin()
        self._loop.data_numbers = self._changed.compare(
            self._loop.data_numbers, self._loop.first_numbers, is_within=first > 0
        )
        self._loop.first_numbers = self._loop.first_numbers or self._loop.data_numbers
        batches = self._batches.begin(self._epoch, self._first) if left else _none()
        with contextlib.closing(batches):
            for number in left:
                batch = next(batches, _END)
                if batch is _END:
                    raise DataError(
                        f"the DataLoader gave {number} batches in epoch {self._epoch}, and {length} were expected: its "
                        "length must be right, or given by resumable(..., batches=)"
                    )
                self._first = number + 1
                self._loop.begin(number % accumulate)
                try:
                    yield batch
                except GeneratorExit:
                    if self._is_open and self._epoch == epoch:  # else it outlived its epoch, which is already counted
                        self._loop.abandon()
                        self._changed.begin()
                    raise
                del batch
                if self._first % accumulate == 0 or self._first == length:
                    self._taking.ask()
                    self._loop.end(last=self._first == length)
        self._loop.rest(self._epoch)
        self._changed.begin()
        if not first:
            return None
        return (  # the value of StopIteration, for code that calls next() once more
            f"the batches of epoch {epoch} are used up: this resume had only {length - first} of {length} "
            "left. Take them with `for batch in loader`, or with next(batches, None), not len(loader) times"
        )

    def _expect_pass(self) -> None:
        """Raise a `TrainError` unless the batches of this epoch have not been taken yet."""
        if not self._is_open or self._is_through:
            raise TrainError(
                "the resumable loader is iterated "
                + (
                    "twice in an epoch, for example by `while True:` around it"
                    if self._is_open
                    else "outside of its epochs"
                )
                + ": write `for epoch in loader.epochs():` instead of `range(epochs)`, and in it, once, `for batch in "
                "loader:`. For anything else, such as a single batch or statistics of the data, keep the DataLoader "
                "that was given to resumable()"
            )

    def _restore(self) -> None:
        for put_back in self._put_back:
            put_back()
        self._put_back = []

    def __len__(self) -> int:
        return self._batches.length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()

    def _numbers(self) -> Iterator[int]:
        return (self._first for _ in itertools.count())


def _none() -> Generator[Any, None, None]:
    yield from ()
