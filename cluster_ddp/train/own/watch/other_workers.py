"""Detects random numbers that the persistent workers of another DataLoader draw, such as one for validation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from cluster_ddp.train.data.fingerprint import drawn_to
from cluster_ddp.train.objects.whose_code import is_ours
from cluster_ddp.train.own.program import living
from cluster_ddp.train.randomness import OwnGenerators, drawn, keep_generators, seed_host

_READ = 2  # samples


def watch_other_workers(own: Any, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about other DataLoaders with persistent workers whose samples are random.

    Their random numbers go on from one pass to the next, and start over after a resume. Workers that start with each
    pass are seeded by the program's generators, and those by the epoch.

    Parameters
    ----------
    own
        The data set of the loader whose position is saved, if there is one.
    warn
        Called with the message.
    """
    yield
    trained_on = own, getattr(own, "_data", None)  # as it is read here, and as the program has it
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
        held = list(OwnGenerators(data, collate))
        before = list(map(drawn_to, held))
        seed_host(0)
        undrawn = drawn()
        seed_host(0)
        samples = [data[index] for index in range(_READ)]
        collate(samples if in_batches else samples[0])
        return drawn() != undrawn or list(map(drawn_to, held)) != before
    return False
