"""What a rank trains on, from a given step to the end: its micro-batches, with their samples."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from cluster_ddp.job import BatchPlan, TrainSpec, plan_batch
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import read_record, update_record
from cluster_ddp.train.data.fetch import LOOK, Fetcher
from cluster_ddp.train.data.loader import Loader
from cluster_ddp.train.data.made_from import NOT_PUT_BACK, WORKERS_HAVE_COPIES, AtFirst, MadeFrom
from cluster_ddp.train.data.order import MicroBatch, Order, SampleStream, rank_micro_batches
from cluster_ddp.train.data.sets import refuse_loader
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.objects.held import enclosing_methods
from cluster_ddp.train.objects.surroundings import variables_around
from cluster_ddp.train.randomness import Use
from cluster_ddp.train.ranks.distributed import World, all_gather_object, broadcast_object
from cluster_ddp.train.state.counts import Counts
from cluster_ddp.train.task import Task


def agree_on_batches(train: TrainSpec, run: RunDirectory | None, world: World) -> BatchPlan:
    """Plan the batches. The first attempt of a run determines the global batch and records it; later ones keep it.

    Raises
    ------
    BatchError
        The global batch cannot be divided among this many ranks; the message lists the numbers of ranks that work.
    """
    recorded = read_record(run).global_batch if run is not None and world.is_main else None
    known = broadcast_object(recorded)
    plan = plan_batch(train, world.world_size, known)
    if run is not None and world.is_main and known is None:
        update_record(run, global_batch=plan.global_batch)
    return plan


class Stream(Order, Protocol):
    """The training data as seen by the loop."""

    data: Dataset[Any]
    total_steps: int
    steps_per_epoch: int | None

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for batches."""

    def made_from(self, model: nn.Module) -> MadeFrom:
        """What samples are made from now, as far as training, which is that of this model, must not change it."""

    def batches(self, step: int, counts: Counts, at_first: AtFirst = nullcontext) -> Iterator[tuple[MicroBatch, Any]]:
        """This rank's micro-batches from this step on, on its device.

        Parameters
        ----------
        at_first
            Gives the task the state that it had before training, within the block; all ranks call it together.
        """

    def note_place(self, counts: Counts) -> None:
        """Record in the counts what a resume needs to know about the places of other ranks; all ranks call it."""

    def close(self) -> None:
        """Stop the workers."""


Warn = Callable[[str], None]

_LOOKED_AT = 4  # samples of a map-style set that are compared between ranks and attempts


def open_stream(
    task: Task, train: TrainSpec, plan: BatchPlan, world: World, device: torch.device, warn: Warn
) -> Stream:
    """Create the stream of the task's training data.

    Parameters
    ----------
    warn
        Called with warnings about the data set.

    Raises
    ------
    DataError
        The data set is shorter than a global batch, has no length although the job file sets no number of steps, or is
        a DataLoader.
    """
    data = task.train_data()
    refuse_loader(data, "train_data()")
    if isinstance(data, IterableDataset):
        from cluster_ddp.train.data.iterable import IterableStream

        return IterableStream(data, task, train, plan, world, device, warn)
    return MapStream(data, task, train, plan, world, device, warn)


class MapStream:
    """The stream of a map-style data set."""

    def __init__(
        self,
        data: Dataset[Any],
        task: Task,
        train: TrainSpec,
        plan: BatchPlan,
        world: World,
        device: torch.device,
        warn: Warn,
    ) -> None:
        samples = _length(data)
        _expect_one_length(samples)
        if callable(getattr(data, "set_epoch", None)):
            warn(
                f"set_epoch() of the training set ({type(data).__name__}) is never called: only that of an "
                "IterableDataset is. Random numbers that a sample draws differ in each epoch without it"
            )
        self.order = SampleStream(samples, plan.global_batch, train.seed, train.drop_last)
        self.steps_per_epoch: int | None = self.order.steps_per_epoch
        self.total_steps = train.steps or (train.epochs or 1) * self.order.steps_per_epoch
        self.data, self._task, self._sources = data, task, (data, task.collate)
        self._fetcher = Fetcher(data, task.collate, Use.SAMPLE, train.seed, exact=True)
        self._fetcher.expect_changes(task, *enclosing_methods(task).values(), *variables_around([task]).values())
        self._plan, self._rank, self._workers, self._device = plan, world.rank, train.workers, device
        self._warn = warn
        self._has_model = False  # whether samples may be made by the model, and so differ at each resume
        self._loader: Loader[MicroBatch] | None = None

    @property
    def waited(self) -> float:
        return self._loader.waited if self._loader else 0.0

    def epoch(self, step: int) -> int:
        return self.order.epoch(step)

    def consumed(self, step: int) -> int:
        return self.order.consumed(step)

    def made_from(self, model: nn.Module) -> MadeFrom:
        if self._workers:
            return MadeFrom(*self._sources, why=WORKERS_HAVE_COPIES, model=model)
        made = MadeFrom(*self._sources, why=NOT_PUT_BACK, is_read_here=True, put_back_by=self._task, model=model)
        self._has_model = made.has_model
        self._fetcher.is_changed_by_steps = lambda: made.has_model or made.is_changed is not False  # or None: not known
        return made

    def batches(self, step: int, counts: Counts, at_first: AtFirst = nullcontext) -> Iterator[tuple[MicroBatch, Any]]:
        """See `Stream`; raises a `DataError` if the length of the data set has changed since the save."""
        counts.expect_length(self.order.samples)
        if not self._workers:
            self._fetcher.at_first, self._fetcher.is_resumed = at_first, step > 0
        micro_batches = rank_micro_batches(self.order, self._plan, self._rank, step, self.total_steps)
        some = [next(micro_batches)] if step < self.total_steps else []
        # After the first batch, with which the set is checked.
        places = np.unique(np.linspace(0, self.order.samples - 1, _LOOKED_AT).astype(np.int64))
        looks = [micro._replace(epoch=LOOK, indices=places) for micro in some]
        self._loader = self._load(itertools.chain(some, looks, micro_batches), workers=self._workers)
        batches = iter(self._loader)
        first = [next(batches) for _ in some]
        for look, seen in [next(batches) for _ in looks]:
            self._compare(look, seen, counts, at_first)
        yield from first
        yield from batches

    def _compare(self, look: MicroBatch, seen: int, counts: Counts, at_first: AtFirst) -> None:
        """Warn if samples differ between ranks, or are not what they were before the training that is resumed.

        This is not refused: different kinds of processors may make samples whose last bits differ.
        """
        by_rank = all_gather_object((seen, platform.node()))
        others = [rank for rank, (found, _) in enumerate(by_rank) if found != by_rank[0][0]]
        what = "a sample of train_data()"
        if others:
            hosts = f"rank 0 on {by_rank[0][1]} and on rank {others[0]} on {by_rank[others[0]][1]}"
            self._warn(
                f"{what} is not the same on {hosts}: each step trains on the wrong samples, some twice and some "
                "never. Every rank has to see the same data set in the same order: sort its file names"
            )
            seen = by_rank[0][0]
        elif counts.samples_fingerprint not in (None, seen):
            if not self._workers:  # it may be made from what the task has restored, such as its label
                with at_first():
                    seen = self._fetcher(look.epoch, look.indices)
            if counts.samples_fingerprint != seen:
                self._warn(
                    f"{what} has changed since the checkpoint was saved: this resume is not exact. The data set, "
                    "the order of its files, the augmentation and train.seed must stay the same. Only with "
                    "train.workers: 0 may samples depend on state that the task restores, such as a level of difficulty"
                )
        counts.samples_fingerprint = None if self._has_model else seen

    def note_place(self, counts: Counts) -> None:
        """Do nothing: the places of all ranks follow from the step."""

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _load(self, micro_batches: Iterator[MicroBatch], *, workers: int) -> Loader[MicroBatch]:
        return Loader(
            self._fetcher,
            micro_batches,
            lambda micro: (micro.epoch, micro.indices),
            workers=workers,
            device=self._device,
        )


def _expect_one_length(length: int) -> None:
    lengths = all_gather_object(length)
    if len(set(lengths)) > 1:
        raise DataError(
            f"train_data() has a different length on each rank ({', '.join(map(str, lengths))}, by rank): every rank "
            "must see the whole data set; the trainer divides it. Do not split it by rank; download in prepare(), "
            "which runs before the sets are made"
        )


def _length(data: Dataset[Any]) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"train_data() returned a data set ({type(data).__name__}) without a length: "
            "give it __len__, or derive it from IterableDataset"
        ) from error
