"""Sees that the steps of a loop of one's own read from another DataLoader, whose place nothing keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader


class OtherLoaders:
    """Warns, after the second step, about passes over DataLoaders that go on from step to step.

    Such as ``next(batches)`` of an iterator that was made before the loop, or ``zip(loader, other)``. A pass that
    begins and ends within a step, as that of an evaluation, is none.

    Parameters
    ----------
    own
        The data set of the loader whose place is kept, if there is one.
    warn
        Takes the message.
    """

    def __init__(self, own: Any, warn: Callable[[str], None]) -> None:
        self._own, self._warn = own, warn
        self._before: list[tuple[weakref.ref[Any], int, str]] = []

    def first(self) -> None:
        """Call after the first step."""
        others = [batches for batches in _under_way() if batches._dataset is not self._own]
        self._before = [(weakref.ref(found), found._num_yielded, type(found._dataset).__name__) for found in others]

    def second(self) -> None:
        """Call after the second."""
        now = [(ref(), number, name) for ref, number, name in self._before]
        # One that is gone was read to its end, as by cycle(), which then gives what it has been given.
        if names := {name for found, number, name in now if found is None or found._num_yielded > number}:
            self._warn(
                f"the steps read on in another DataLoader (of a {', '.join(sorted(names))}), which starts over at a "
                "resume, because no checkpoint holds its place: a resume is exact only where no step depends on it. "
                "Hand it to run.resumable(), and of two let one data set give what both give"
            )


def _under_way() -> list[Any]:
    """The iterators over DataLoaders that anything holds."""
    single, several = dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter
    return [held for held in gc.get_objects() if type(held) is single or type(held) is several]
