"""Reads the items of an iterable data set from any place on, and makes them a rank's micro-batches."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from cluster_ddp.job import BatchPlan
from cluster_ddp.printing import say
from cluster_ddp.train.data.another_worker import in_copy_of_worker
from cluster_ddp.train.data.collating import DEFAULT_COLLATES, try_collate
from cluster_ddp.train.data.fingerprint import drawn_to, fingerprint, settled
from cluster_ddp.train.data.loader import make_sendable
from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.data.seeded_reads import Collate
from cluster_ddp.train.data.sets import copied
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.randomness import OwnGenerators, Use, derive, drawn, mix, parts_of, seed_host
from cluster_ddp.train.ranks.distributed import find_world

Place = tuple[int, int]  # the epoch, and the number of its items used so far

_TRIED = 3
_SKIPPED = 32  # how many items skip() is tried with at most


class Remaining(IterableDataset[Any]):
    """The rest of the training as a data set, for a process that reads ahead."""

    def __init__(self, reader: Reader, step: int, stop: int, place: Place) -> None:
        self._reader, self._step, self._stop, self._place = reader, step, stop, place

    def __iter__(self) -> Iterator[Any]:
        try:
            first = self._reader.try_set()
            yield first
            yield from self._reader.read(self._step, self._stop, self._place, first)
        except DataError as error:
            yield error
        except Exception as error:
            make_sendable(error)
            raise


class Reader:
    """Picks a rank's items from the stream."""

    def __init__(
        self, data: IterableDataset[Any], collate: Collate, seed: int, plan: BatchPlan, rank: int, *, sharded: bool
    ) -> None:
        self._data, self._collate, self._plan, self._sharded = data, collate, plan, sharded
        self._base = derive(Use.SAMPLE, seed, rank) if sharded else derive(Use.SAMPLE, seed)
        self._drawn: list[tuple[float, ...]] = []  # the generators' next numbers after each item read last
        self._threads = False  # whether the set reads in its own threads
        self._generators = OwnGenerators()
        self._at_first: list[int] = []  # how far those of the set were after its first items
        self._are_restarted = True  # whether they are there again after reading these once more
        self._has_tried_collate = getattr(collate, "__func__", collate) in DEFAULT_COLLATES
        self._untouched: Reader | None = None  # one that has a copy of the set
        piece = plan.micro_batch * plan.accumulation_steps
        self._own = range(piece) if sharded else range(rank * piece, (rank + 1) * piece)
        self._items_per_step = piece if sharded else plan.global_batch

    def try_set(self) -> int:
        """Read the first items until two readings agree, and return their fingerprint; else raise a `DataError`.

        The generators that the set holds are seeded unless it restarts them itself with each pass, as sets that shuffle
        do, or the first items draw from none of them.
        """
        around = generators_around(parts_of(self._data, self._collate))
        holders = (self._data, getattr(self._collate, "__self__", self._collate))
        of_set = OwnGenerators(self._data)
        self._generators = OwnGenerators(*holders, around=around, apart_from=of_set)
        try:
            found = self._try_as_seeded()
            if self._are_restarted:
                return found
        except DataError:
            if not of_set:
                raise
        self._generators = OwnGenerators(*holders, around=around)
        return self._try_as_seeded()

    def _try_as_seeded(self) -> int:
        draws: list[list[tuple[float, ...]]] = []
        places: list[list[int]] = []

        def read() -> int:
            found = fingerprint(self._fingerprints(0, 0, _TRIED))
            draws.append(self._drawn[1:])  # the first item may initialise the set
            places.append(self._places())
            return found

        there = self._elsewhere()
        first = settled(read)
        self._at_first, self._are_restarted = places[-1], places[-1] == places[-2]
        if self._threads and (first is None or self._draws(first)):
            raise DataError(
                f"the training set ({type(self._data).__name__}) reads in its own threads, and draws random numbers "
                "there, which cannot be seeded: no resume could be exact. Move the random part into collate() or "
                "loss() of the task, which are seeded"
            )
        if first is None:
            raise DataError(
                f"the training set ({type(self._data).__name__}) gives different items when the same epoch is read "
                "again, so no resume could be exact: let its order and its random numbers depend only on "
                "set_epoch(epoch), or from the global generators, which are seeded before each item, not from a count "
                "of its passes"
            )
        if draws[0] != draws[-1]:
            raise DataError(
                f"the training set ({type(self._data).__name__}) draws the random numbers of an item when it is read "
                "for the first time, and keeps the result, so no resume could be exact: a cache has to "
                "hold items before augmentation"
            )
        if there not in (None, first):
            raise DataError(
                f"the training set ({type(self._data).__name__}) gives different items after others have been read, "
                "such as words that are numbered in order of appearance, so no resume could be exact: number in "
                "__init__, or let an item depend only on the epoch and its place"
            )
        return first

    def _places(self) -> list[int]:
        """How far the generators that the set holds have come."""
        return list(map(drawn_to, OwnGenerators(self._data)))

    def _elsewhere(self) -> int | None:
        """The fingerprint of the first items where others have been read before; None if that cannot be found out."""
        if (there := in_copy_of_worker(self._after_others)) is None:
            self._untouched = copy.copy(self)  # kept, as some close files when deleted
            self._untouched._data = copied(self._data)
            with contextlib.suppress(Exception):
                there = self._untouched._after_others()
        return there

    def _after_others(self) -> int:
        """The fingerprint of the first items, read after others of another epoch."""
        self._fingerprints(1, _TRIED, _TRIED)
        return fingerprint(self._fingerprints(0, 0, _TRIED))

    def read(self, step: int, stop: int, place: Place, first: int) -> Iterator[tuple[MicroBatch, Place, Any]]:
        """Yield, for each micro-batch, its description, the place after its step, and its batch.

        Parameters
        ----------
        first
            The fingerprint of the first items, as `try_set` has returned it.
        """
        items = self._items(place, first)
        for number in range(step, stop):
            kept = []
            for position in range(self._items_per_step):
                found, place = next(items)
                if position in self._own:
                    kept.append((found, place))
            yield from self._micro_batches(number, kept, place)

    def _micro_batches(
        self, step: int, kept: list[tuple[Any, Place]], after: Place
    ) -> Iterator[tuple[MicroBatch, Place, Any]]:
        size = self._plan.micro_batch
        for number in range(self._plan.accumulation_steps):
            part = kept[number * size : (number + 1) * size]
            micro = MicroBatch(
                step=step,
                number=number,
                epoch=part[0][1][0],
                indices=np.array([place[1] - 1 for _, place in part], dtype=np.int64),
                samples=len(part),
                global_batch=self._plan.global_batch,
                last=number == self._plan.accumulation_steps - 1,
            )
            items = [item for item, _ in part]
            seed = functools.partial(self._seed, micro.epoch, int(micro.indices[0]))  # ranks draw different numbers
            if not self._has_tried_collate:
                self._has_tried_collate = True
                try_collate(self._collate, items, functools.partial(self._seed_those_made_since, seed))
            seed()
            yield micro, after, self._collate(items)

    def _seed_those_made_since(self, seed: Callable[[], None]) -> None:
        self._generators.find()  # collate() may have made one when it was called, as collators with a seed do
        seed()

    def _items(self, place: Place, first: int) -> Iterator[tuple[Any, Place]]:
        """Yield items from a place on, pass after pass, each with the place after it."""
        epoch, taken = place
        looks_at = epoch + 1  # where it is checked whether the passes before have changed the set
        while True:
            if epoch == looks_at:
                looks_at = 2 * epoch if self._is_as_before(first) else 0
            before = taken
            for item in self._pass(epoch, taken):
                taken += 1
                yield item, (epoch, taken)
            if taken == before == 0:
                raise DataError(f"the iterable training set yielded no item in epoch {epoch}")
            epoch, taken = epoch + 1, 0

    def _is_as_before(self, first: int) -> bool:
        """Warn if a pass begins with other items than before the passes so far, which a resume does not read again."""
        if fingerprint(self._fingerprints(0, 0, _TRIED)) == first and self._places() == self._at_first:
            return True
        if self._sharded or find_world().is_main:
            say(
                f"cluster-ddp: the training set ({type(self._data).__name__}) returns different items after a pass "
                "than before it, in the same epoch and with the same seed: a resume is exact only if whatever changed "
                "in it is restored. Let a pass depend only on set_epoch(epoch), not on how many there were or on what "
                "they have left"
            )
        return False

    def _pass(self, epoch: int, taken: int) -> Iterator[Any]:
        """The items of an epoch from a place on; earlier ones are skipped if that is equivalent, else read."""
        if not taken or self._skips(epoch, min(taken, _SKIPPED)):
            return self._seeded(epoch, taken)
        return islice(self._seeded(epoch, 0), taken, None)

    def _skips(self, epoch: int, items: int) -> bool:
        if getattr(self._data, "skip", None) is None:
            return False
        if self._fingerprints(epoch, 0, items + 1)[items:] == self._fingerprints(epoch, items, 1):
            return True
        say(
            f"cluster-ddp: {type(self._data).__name__}.skip() does not continue with the items that reading would "
            "return, for instance because skipped items draw random numbers: the items up to the point of the resume "
            "are read and discarded"
        )
        return False

    def _fingerprints(self, epoch: int, taken: int, number: int) -> list[int]:
        items, threads = self._seeded(epoch, taken), threading.active_count()
        found, self._drawn = [], []
        for item in islice(items, number):
            found.append(fingerprint(item))
            self._drawn.append(drawn())  # the generators are seeded again before the next item
        self._threads = self._threads or threading.active_count() > threads
        return found

    def _draws(self, seen: int) -> bool:
        """Whether other seeds change the first items, whose fingerprint is passed in."""
        base, self._base = self._base, mix(self._base)
        other = fingerprint(self._fingerprints(0, 0, _TRIED))
        self._base = base
        return other != seen

    def _seeded(self, epoch: int, taken: int) -> Iterator[Any]:
        """Iterate over the set from a place on, seeding before each item."""
        self._seed(epoch, taken)  # a set may shuffle when its iteration starts
        items = iter(self._begun(epoch, taken))
        while True:
            self._seed(epoch, taken)
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
            taken += 1

    def _begun(self, epoch: int, taken: int) -> Any:
        """Prepare the set for a pass; each of its methods may modify it or return another."""
        data = _called(self._data, "set_epoch", epoch)
        skipped = _called(data, "skip", taken)  # also for 0 items: the set may still be skipping those of another pass
        return _called(skipped, "set_epoch", epoch) if taken and skipped is not data else data

    def _seed(self, epoch: int, taken: int) -> None:
        seed = mix(mix(self._base ^ mix(epoch)) ^ taken)
        seed_host(seed)
        self._generators.seed(seed)


def _called(data: Any, name: str, value: int) -> Any:
    method = getattr(data, name, None)
    changed = None if method is None else method(value)
    return changed if hasattr(changed, "__iter__") else data
