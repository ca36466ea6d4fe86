"""Training on an IterableDataset with exact resume.

For an exact resume that uses each item once per pass, the data set must follow these rules:

- It yields the same items in the same order whenever it is iterated in the same epoch, on every rank and in every
  process. It does not shard by rank or worker: the trainer picks each rank's items from the common stream, whose order
  is that of the global batches. If that is too slow, see `Task.sharded`.
- ``set_epoch(epoch)``, if it has one, is called before each pass over it.
- ``skip(items)``, if it has one, is called after that: the pass must start that many items later.
- Both may modify the data set or return a new one.
- torch, random, numpy and the generators in its attributes are seeded by (seed, epoch, position) before each item is
  requested, so random augmentation in ``__iter__`` is exact too.

This is checked as far as possible: the first items are read twice and must be the same, on all ranks too; and a resume
uses ``skip`` only if the item after a few skipped ones is the one that reading gives. Otherwise, the items already used
are read and dropped.

If a pass ends inside a global batch, the next pass continues in the same batch: nothing is dropped, and
``train.drop_last`` has no effect. ``train.steps`` is required unless the data set has a length. At most one worker
reads ahead, because several would change the order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from cluster_ddp.job import BatchPlan, TrainSpec
from cluster_ddp.train.data.loader import from_workers, to_device
from cluster_ddp.train.data.made_from import READ_FROM_THE_FIRST, WORKERS_HAVE_COPIES, AtFirst, MadeFrom
from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.data.reader import Place, Reader, Remaining
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.ranks.distributed import World, all_gather_object
from cluster_ddp.train.state.counts import Counts
from cluster_ddp.train.task import Task


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
        self.data: Dataset[Any] = data
        self._sources = (data, task.collate)
        self._reader = Reader(data, task.collate, train.seed, plan, world.rank, sharded=self._sharded)
        self._plan, self._world, self._device, self._workers = plan, world, device, min(train.workers, 1)
        self._counts = Counts()
        self._has_moved = False
        self._batches: Any = None

    def epoch(self, step: int) -> int:
        """The current epoch."""
        return self._counts.stream_epoch

    def consumed(self, step: int) -> int:
        return step * self._plan.global_batch

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
        remaining = Remaining(self._reader, step, stop, place)
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
            raise DataError(
                "the checkpoint was saved by a task that is not sharded, or by one rank: resume it the same way"
            )
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
                "this resume is not exact. The order of the files, the augmentation and train.seed must stay the same. "
                "Only with train.workers: 0 may items depend on state that the task restores, such as a level of "
                "difficulty"
            )
        counts.data_fingerprint = first


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
