"""Training on an IterableDataset, exactly.

The contract of the set, for a training that is resumed exactly and sees each item once:

- It gives the same items in the same order whenever it is iterated in the same epoch, on every rank and in every
  process. It does not shard by rank or by worker: the trainer takes each rank's items out of the one stream, whose
  order is the order of the global batches.
- ``set_epoch(epoch)``, when it has one, is called before each pass over it.
- ``skip(items)``, when it has one, is called after that: the pass is to begin so many items later. Without it the items
  before the place of a resume are read and dropped.
- torch, random and numpy are seeded by (seed, epoch, position) before each item is asked for, so random augmentation
  in ``__iter__`` is exact too (not with ``skip``, if an item draws numbers for the next one).

A pass that ends in the middle of a global batch is followed by the next pass in the same batch: nothing is dropped, and
``train.drop_last`` has no meaning. ``train.steps`` must be given, unless the set has a length. One worker at most reads
ahead, because several would change the order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from cluster_ddp.spec import BatchPlan, TrainSpec
from cluster_ddp.train.data import from_workers, to_device
from cluster_ddp.train.distributed import World
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.fetch import Collate
from cluster_ddp.train.randomness import Use, derive, mix, seed_host
from cluster_ddp.train.sampler import Share
from cluster_ddp.train.state import Counts
from cluster_ddp.train.task import Task

Place = tuple[int, int]  # the epoch, and the items of it that have been taken


class IterableFeed:
    """The feed of an iterable set."""

    def __init__(
        self,
        data: IterableDataset[Any],
        task: Task,
        train: TrainSpec,
        plan: BatchPlan,
        world: World,
        device: torch.device,
    ) -> None:
        self.waited = 0.0
        self.total_steps, self.steps_per_epoch = _lengths(data, train, plan)
        self._reader = _Reader(data, task.collate, train.seed, plan, world.rank)
        self._plan, self._device, self._workers = plan, device, min(train.workers, 1)
        self._counts = Counts()
        self._batches: Any = None

    def epoch(self, step: int) -> int:
        """The epoch that is under way now."""
        return self._counts.stream_epoch

    def consumed(self, step: int) -> int:
        """The sample offset when `step` steps are finished."""
        return step * self._plan.global_batch

    def first(self) -> tuple[Share, Any]:
        """The first micro-batch of the whole training."""
        share, _, batch = next(self._reader.read(0, 1, (0, 0)))
        return share, to_device(batch, self._device)

    def batches(self, step: int, counts: Counts) -> Iterator[tuple[Share, Any]]:
        """The micro-batches of this rank from this step on; keeps the place in the stream in `counts`."""
        self._counts = counts
        remaining = _Remaining(self._reader, step, self.total_steps, (counts.stream_epoch, counts.stream_offset))
        self._batches = from_workers(remaining, None, workers=self._workers, device=self._device)
        while True:
            begun = time.perf_counter()
            found = next(self._batches, None)
            self.waited += time.perf_counter() - begun
            if found is None:
                return
            share, (counts.stream_epoch, counts.stream_offset), batch = found
            yield share, to_device(batch, self._device)

    def close(self) -> None:
        """End the worker."""
        if self._batches is not None:
            self._batches.close()


class _Remaining(IterableDataset[Any]):
    """What is left of the training, for a process that reads ahead."""

    def __init__(self, reader: _Reader, step: int, stop: int, place: Place) -> None:
        self._reader, self._step, self._stop, self._place = reader, step, stop, place

    def __iter__(self) -> Iterator[tuple[Share, Place, Any]]:
        return self._reader.read(self._step, self._stop, self._place)


class _Reader:
    """Takes a rank's items out of the stream."""

    def __init__(self, data: IterableDataset[Any], collate: Collate, seed: int, plan: BatchPlan, rank: int) -> None:
        self._data, self._collate, self._plan, self._rank = data, collate, plan, rank
        self._base = derive(Use.SAMPLE, seed)

    def read(self, step: int, stop: int, place: Place) -> Iterator[tuple[Share, Place, Any]]:
        """Yield for each micro-batch its share, the place after its step, and its batch."""
        items = self._items(place)
        piece = self._plan.micro_batch * self._plan.accumulation_steps
        own = range(self._rank * piece, (self._rank + 1) * piece)
        for number in range(step, stop):
            kept = []
            for position in range(self._plan.global_batch):
                found, place = next(items)
                if position in own:
                    kept.append((found, place))
            yield from self._shares(number, kept, place)

    def _shares(self, step: int, kept: list[tuple[Any, Place]], after: Place) -> Iterator[tuple[Share, Place, Any]]:
        size = self._plan.micro_batch
        for number in range(self._plan.accumulation_steps):
            part = kept[number * size : (number + 1) * size]
            share = Share(
                step=step,
                micro_batch=number,
                epoch=part[0][1][0],
                indices=np.array([place[1] - 1 for _, place in part], dtype=np.int64),
                samples=len(part),
                of=self._plan.global_batch,
                last=number == self._plan.accumulation_steps - 1,
            )
            yield share, after, self._collate([item for item, _ in part])

    def _items(self, place: Place) -> Iterator[tuple[Any, Place]]:
        """Yield items from a place on, pass after pass, each with the place after it."""
        epoch, taken = place
        while True:
            before = taken
            items = self._pass(epoch, taken)
            while True:
                seed_host(mix(mix(self._base ^ mix(epoch)) ^ taken))
                try:
                    item = next(items)
                except StopIteration:
                    break
                taken += 1
                yield item, (epoch, taken)
            if taken == before == 0:
                raise DataError(f"the iterable training set gave no item in epoch {epoch}")
            epoch, taken = epoch + 1, 0

    def _pass(self, epoch: int, taken: int) -> Iterator[Any]:
        set_epoch = getattr(self._data, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        skip = getattr(self._data, "skip", None)
        if skip is not None:
            skip(taken)
            return iter(self._data)
        items = iter(self._data)
        for offset in range(taken):
            seed_host(mix(mix(self._base ^ mix(epoch)) ^ offset))
            next(items, None)
        return items


def _lengths(data: IterableDataset[Any], train: TrainSpec, plan: BatchPlan) -> tuple[int, int | None]:
    """Steps of the training and, when the set has a length, whole steps in an epoch."""
    try:
        length = len(data)  # type: ignore[arg-type]
    except TypeError:
        if train.steps is None:
            raise DataError(
                "the training set is iterable and has no length: set train.steps instead of epochs"
            ) from None
        return train.steps, None
    total = train.steps or (train.epochs or 1) * length // plan.global_batch
    if not total:
        raise DataError(
            f"the training set has {length} items, less than one global batch of {plan.global_batch}: lower "
            "train.batch_size or train.global_batch"
        )
    return total, max(1, length // plan.global_batch)
