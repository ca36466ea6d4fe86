"""Detects random numbers that the persistent workers of another DataLoader draw, such as one for validation."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from cluster_ddp.train.data.fingerprint import drawn_to
from cluster_ddp.train.data.sets import copied
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.objects.whose_code import is_ours
from cluster_ddp.train.own.program import living
from cluster_ddp.train.randomness import OwnGenerators, as_now, drawn, keep_generators, seed_host

_READ = 2  # samples
_trained_with: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()  # by this loop, or by an earlier one


def watch_other_workers(own: Any, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about other DataLoaders with persistent workers whose samples are random.

    Their random numbers go on from one pass to the next, and start over after a resume. Workers that start with each
    pass are seeded by the program's generators, and those by the epoch.

    Parameters
    ----------
    own
        The loader whose position is saved, if there is one.
    warn
        Called with the message.
    """
    yield
    if isinstance(own, DataLoader):
        _trained_with.add(own)
    trained_on = [loader.dataset for loader in _trained_with]
    names = {
        type(loader.dataset).__name__
        for loader in living(DataLoader)
        if loader.persistent_workers
        and not is_ours(loader.dataset)
        and not any(loader.dataset is data for data in trained_on)
        and is_random(loader.dataset, loader.collate_fn, in_batches=loader.batch_sampler is not None)
    }
    if names:
        warn(
            f"the persistent workers of another DataLoader (of {', '.join(sorted(names))}) draw random numbers, which "
            "go on from one pass to the next, and start over after a resume: a resume is exact only if training does "
            "not depend on what that loader gives, as by a scheduler, early stopping or a best model. Use "
            "persistent_workers=False there"
        )


def is_random(data: Any, collate: Callable[[Any], Any], *, in_batches: bool = True) -> bool:
    """Whether the first samples of a map-style data set, or what collates them, draw random numbers."""
    if isinstance(data, IterableDataset):
        return False
    with contextlib.suppress(Exception), keep_generators():
        held = [*OwnGenerators(data, collate), *generators_around([data, collate]).values()]
        before, restoring = list(map(drawn_to, held)), list(map(as_now, held))
        seed_host(0)
        undrawn = drawn()
        seed_host(0)
        copy = copied(data)  # the program's is not to open here what its workers would share, such as a file
        read = data if copy is None else copy
        try:
            samples = [read[index] for index in range(_READ)]
            collate(samples if in_batches else samples[0])
            return drawn() != undrawn or list(map(drawn_to, held)) != before
        finally:
            for restore in restoring:
                restore()
    return False
