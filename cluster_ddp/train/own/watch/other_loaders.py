"""Detects steps that read from a second DataLoader, whose position no checkpoint contains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import cycle
from typing import Any

from torch.utils.data import dataloader

from cluster_ddp.train.own.program import living


class OtherLoaders:
    """Warns, after the second step, about passes over DataLoaders that continue from step to step.

    Examples are ``next(batches)`` on an iterator made before the loop, and ``zip(loader, other)``. A pass that begins
    and ends within a step, such as that of an evaluation, does not count.

    Parameters
    ----------
    own
        The data set of the loader whose position is saved, if there is one.
    warn
        Called with the message.
    """

    def __init__(self, own: Any, warn: Callable[[str], None]) -> None:
        self._own, self._warn = own, warn
        self._before: list[tuple[weakref.ref[Any], int, str, bool]] = []

    def first(self) -> None:
        """Call after the first step."""
        others = [batches for batches in _under_way() if batches._dataset is not self._own]
        cycled = {id(part) for held in living(cycle) for part in gc.get_referents(held)}
        self._before = [
            (weakref.ref(found), found._num_yielded, type(found._dataset).__name__, id(found) in cycled)
            for found in others
        ]

    def second(self) -> None:
        """Call after the second step."""
        names = set()
        for ref, number, name, is_cycled in self._before:
            batches = ref()  # None: a cycle() has exhausted it and repeats its batches
            if is_cycled if batches is None else batches._num_yielded > number:
                names.add(name)
        if names:
            self._warn(
                f"the steps read from another DataLoader (of a {', '.join(sorted(names))}), which starts over after a "
                "resume, because no checkpoint contains its position: a resume is exact only if no step depends on it. "
                "Pass it to run.resumable(), or combine two data sets into one that returns both"
            )


def _under_way() -> list[Any]:
    """All live iterators over DataLoaders."""
    return living(dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
