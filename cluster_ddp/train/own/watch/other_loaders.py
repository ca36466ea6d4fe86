"""Detects steps that read from a second DataLoader, whose position no checkpoint contains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

from torch.utils.data import dataloader

from cluster_ddp.train.own.program import living


def watch_other_loaders(own: Any, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about passes over DataLoaders that continue from step to step.

    Examples are ``next(batches)`` on an iterator made before the loop, and ``zip(loader, other)``. A pass that begins
    and ends within a step, such as that of an evaluation, does not count.

    Parameters
    ----------
    own
        The data set of the loader whose position is saved, if there is one.
    warn
        Called with the message.
    """
    before = list(_under_way(own))
    yield
    names = set()
    for ref, number, name, is_cycled in before:
        batches = ref()  # None: a cycle() has exhausted it and repeats its batches
        if is_cycled if batches is None else batches._num_yielded > number:
            names.add(name)
    if names:
        warn(
            f"the steps read from another DataLoader (of {', '.join(sorted(names))}), which starts over after a "
            "resume, because no checkpoint contains its position: a resume is exact only if no step depends on it. "
            "Pass it to run.resumable(), or combine two data sets into one that returns both"
        )


def _under_way(own: Any) -> Iterator[tuple[weakref.ref[Any], int, str, bool]]:
    """The live iterators over other DataLoaders: how far each is, of what data set, and whether in a cycle()."""
    cycled = {id(part) for held in living(cycle) for part in gc.get_referents(held)}
    for found in living(dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
        if found._dataset is not own:
            yield weakref.ref(found), found._num_yielded, type(found._dataset).__name__, id(found) in cycled
