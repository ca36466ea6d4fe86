"""Training on an IterableDataset with exact resume.

For an exact resume that uses each item once per pass, the data set must follow these rules:

- It yields the same items in the same order whenever it is iterated in the same epoch, on every rank and in every
  process. It does not shard by rank or worker: the trainer picks each rank's items from the common stream, whose order
  is that of the global batches. If that is too slow, see `Task.sharded`.
- ``set_epoch(epoch)``, if it has one, is called before each pass over it.
- ``skip(items)``, if it has one, is called after that: the pass must start that many items later.
- Both may modify the data set or return a new one.
- torch, random and numpy are seeded by (seed, epoch, position) before each item is requested, so random augmentation
  in ``__iter__`` is exact too.

This is checked as far as possible: the first items are read twice and must be the same, on all ranks too; and a resume
uses ``skip`` only if the item after a few skipped ones is the one that reading gives. Otherwise, the items already used
are read and dropped.

If a pass ends inside a global batch, the next pass continues in the same batch: nothing is dropped, and
``train.drop_last`` has no effect. ``train.steps`` is required unless the data set has a length. At most one worker
reads ahead, because several would change the order.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from cluster_ddp.job import BatchPlan, TrainSpec
from cluster_ddp.printing import say
from cluster_ddp.train.data.another_worker import in_copy_of_worker
from cluster_ddp.train.data.fetch import Collate
from cluster_ddp.train.data.fingerprint import fingerprint, settled
from cluster_ddp.train.data.loader import from_workers, make_sendable, to_device
from cluster_ddp.train.data.made_from import READ_FROM_THE_FIRST, WORKERS_HAVE_COPIES, AtFirst, MadeFrom
from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.data.sets import copied
from cluster_ddp.train.distributed import World, all_gather_object, find_world
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.randomness import Use, derive, drawn, mix, seed_host
from cluster_ddp.train.state.counts import Counts
from cluster_ddp.train.task import Task

Place = tuple[int, int]  # the epoch, and the number of its items used so far

_TRIED = 3


class IterableStream:
    """The stream of an iterable data set; see `Stream`."""

    def __init__(
        self,
        data: IterableDataset[Any],
        task: Task,
        train: TrainSpec,
        plan: BatchPlan,
        world: World,
        device: torch.device,
        warn: Callable[[str], None],
    ) -> None:
        self.waited = 0.0
        self._warn = warn
        self._sharded = task.sharded and world.world_size > 1
        self._length = _length(data, sharded=self._sharded)
        self.total_steps, self.steps_per_epoch = _steps(self._length, train, plan)
        self._sources = (data, task.collate)
        self._reader = _Reader(data, task.collate, train.seed, plan, world.rank, sharded=self._sharded)
        self._plan, self._world, self._device, self._workers = plan, world, device, min(train.workers, 1)
        self._counts = Counts()
        self._has_moved = False
        self._batches: Any = None

    def epoch(self, step: int) -> int:
        """The current epoch."""
        return self._counts.stream_epoch

    def consumed(self, step: int) -> int:
        return step * self._plan.global_batch

    def first(self) -> tuple[MicroBatch, Any]:
        reading = self._read(0, 1, (0, 0))
        next(reading)
        first, _, batch = next(reading)
        self.close()
        return first, to_device(batch, self._device)

    def made_from(self, model: nn.Module) -> MadeFrom:
        if self._workers:
            return MadeFrom(*self._sources, why=WORKERS_HAVE_COPIES, model=model)
        return MadeFrom(self._sources[0], why=READ_FROM_THE_FIRST, is_read_here=True, model=model)

    def batches(self, step: int, counts: Counts, at_first: AtFirst = nullcontext) -> Iterator[tuple[MicroBatch, Any]]:
        """See `Stream`; raises a `DataError` if the first items show that the data set breaks its rules."""
        self._counts = counts  # already now: an evaluation may be repeated before the first batch
        return self._batches_from(step, counts, at_first)

    def _batches_from(self, step: int, counts: Counts, at_first: AtFirst) -> Iterator[tuple[MicroBatch, Any]]:
        if self._length is not None:
            counts.expect_length(self._length)
        reading = self._read(step, self.total_steps, self._place(counts))
        self._expect_same_items(next(reading), counts, at_first)
        while True:
            begun = time.perf_counter()
            found = next(reading, None)
            self.waited += time.perf_counter() - begun
            if found is None:
                return
            micro, (counts.stream_epoch, counts.stream_offset), batch = found
            self._has_moved = True
            yield micro, to_device(batch, self._device)

    def note_place(self, counts: Counts) -> None:
        if self._sharded and self._has_moved:  # before that, they contain what was restored
            counts.stream_places = all_gather_object([counts.stream_epoch, counts.stream_offset])

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def _read(self, step: int, stop: int, place: Place) -> Any:
        remaining = _Remaining(self._reader, step, stop, place)
        self._batches = from_workers(remaining, None, workers=self._workers, device=self._device)
        return self._batches

    def _place(self, counts: Counts) -> Place:
        places = counts.stream_places
        if places is not None and len(places) != self._world.world_size:
            raise DataError(
                f"the set is read in {len(places)} parts, one by each rank (sharded = True of the task): resume on "
                f"{len(places)} ranks, not {self._world.world_size}"
            )
        if places is None and self._sharded and (counts.stream_epoch or counts.stream_offset):
            raise DataError("the checkpoint was saved by a task that is not sharded, or by one rank: resume it so")
        epoch, taken = (counts.stream_epoch, counts.stream_offset) if places is None else places[self._world.rank]
        return epoch, taken

    def _expect_same_items(self, first: int, counts: Counts, at_first: AtFirst) -> None:
        """Check that all ranks read the same first items, unless sharded, and the same as earlier attempts."""
        seen = all_gather_object(first)
        if self._sharded:
            if len(set(seen)) == 1:
                self._warn("the task says sharded = True, but all ranks read the same items")
            return
        if len(set(seen)) > 1:
            raise DataError(
                "the ranks read different items from train_data(): each rank would train on only a fraction of its "
                "share. Give every rank the whole stream in the same order, or set sharded = True in the task if each "
                "reads its own part"
            )
        if counts.data_fingerprint not in (None, first) and not self._workers:
            with at_first():  # they may be made from what the task has restored, such as a level of difficulty
                first = self._reader.try_set()
        if counts.data_fingerprint not in (None, first):
            self._warn(
                "train_data() does not start with the same items as when the checkpoint was saved: "
                "this resume is not exact. The order of the files and the augmentation must stay the same. Only with "
                "train.workers: 0 may items depend on state that the task restores, such as a level of difficulty"
            )
        counts.data_fingerprint = first


class _Remaining(IterableDataset[Any]):
    """The rest of the training as a data set, for a process that reads ahead."""

    def __init__(self, reader: _Reader, step: int, stop: int, place: Place) -> None:
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


class _Reader:
    """Picks a rank's items from the stream."""

    def __init__(
        self, data: IterableDataset[Any], collate: Collate, seed: int, plan: BatchPlan, rank: int, *, sharded: bool
    ) -> None:
        self._data, self._collate, self._plan, self._sharded = data, collate, plan, sharded
        self._base = derive(Use.SAMPLE, seed, rank) if sharded else derive(Use.SAMPLE, seed)
        self._drawn: list[tuple[float, ...]] = []  # the generators' next numbers after each item read last
        self._threads = False  # whether the set reads in its own threads
        self._untouched: _Reader | None = None  # one that has a copy of the set
        piece = plan.micro_batch * plan.accumulation_steps
        self._own = range(piece) if sharded else range(rank * piece, (rank + 1) * piece)
        self._items_per_step = piece if sharded else plan.global_batch

    def try_set(self) -> int:
        """Read the first items until two readings agree, and return their fingerprint; else raise a `DataError`."""
        draws: list[list[tuple[float, ...]]] = []

        def read() -> int:
            found = fingerprint(self._fingerprints(0, 0, _TRIED))
            draws.append(self._drawn[1:])  # the first item may initialise the set
            return found

        there = self._elsewhere()
        first = settled(read)
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
            self._seed(micro.epoch, int(micro.indices[0]))  # the ranks draw different numbers here
            yield micro, after, self._collate([item for item, _ in part])

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
        if fingerprint(self._fingerprints(0, 0, _TRIED)) == first:
            return True
        if self._sharded or find_world().is_main:
            say(
                f"cluster_ddp: the training set ({type(self._data).__name__}) returns different items after a pass "
                "than before it, in the same epoch and with the same seed: a resume is exact only if whatever changed "
                "in it is restored. Let a pass depend only on set_epoch(epoch), not on how many there were or on what "
                "they have left"
            )
        return False

    def _pass(self, epoch: int, taken: int) -> Iterator[Any]:
        """The items of an epoch from a place on; earlier ones are skipped if that is equivalent, else read."""
        if not taken or self._skips(epoch):
            return self._seeded(epoch, taken)
        return islice(self._seeded(epoch, 0), taken, None)

    def _skips(self, epoch: int) -> bool:
        if getattr(self._data, "skip", None) is None:
            return False
        read = self._fingerprints(epoch, 0, _TRIED)
        if len(read) == _TRIED and read[-1:] == self._fingerprints(epoch, _TRIED - 1, 1):
            return True
        say(
            f"cluster_ddp: {type(self._data).__name__}.skip() does not continue with the items that reading would "
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
        seed_host(mix(mix(self._base ^ mix(epoch)) ^ taken))


def _called(data: Any, name: str, value: int) -> Any:
    method = getattr(data, name, None)
    changed = None if method is None else method(value)
    return changed if hasattr(changed, "__iter__") else data


def _length(data: IterableDataset[Any], *, sharded: bool) -> int | None:
    """Items per epoch, over all ranks together; None if the set has no length."""
    try:
        length: int | None = len(data)  # type: ignore[arg-type]
    except TypeError:
        length = None
    lengths = all_gather_object(length)
    if sharded and None not in lengths:
        return sum(filter(None, lengths))
    if len(set(lengths)) > 1:
        raise DataError(
            f"train_data() has a different length on each rank ({', '.join(map(str, lengths))}, by rank): give every "
            "rank the whole stream, or set sharded = True in the task if each reads its own part"
        )
    return length


def _steps(length: int | None, train: TrainSpec, plan: BatchPlan) -> tuple[int, int | None]:
    """The number of steps and, if the set has a length, the number of whole steps per epoch."""
    if length is None:
        if train.steps is None:
            raise DataError("the training set is iterable and has no length: set train.steps instead of epochs")
        return train.steps, None
    total = train.steps or (train.epochs or 1) * length // plan.global_batch
    if not total:
        raise DataError(
            f"the training set has {length} items, less than one global batch of {plan.global_batch}: lower "
            "train.batch_size or train.global_batch"
        )
    return total, max(1, length // plan.global_batch)
