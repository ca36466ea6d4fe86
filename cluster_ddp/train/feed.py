"""What a rank trains on, from a given step to the end: shares of the global batches, and their samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset

from cluster_ddp.spec import BatchPlan, TrainSpec
from cluster_ddp.train.data import Loader
from cluster_ddp.train.distributed import World
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.fetch import Fetcher
from cluster_ddp.train.randomness import Use
from cluster_ddp.train.sampler import SampleStream, Share, rank_shares
from cluster_ddp.train.state import Counts
from cluster_ddp.train.task import Task


class Feed(Protocol):
    """The training data as the loop sees it."""

    total_steps: int
    steps_per_epoch: int | None

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for batches."""

    def epoch(self, step: int) -> int:
        """The epoch that is under way when `step` steps are finished."""

    def consumed(self, step: int) -> int:
        """The sample offset when `step` steps are finished."""

    def first(self) -> tuple[Share, Any]:
        """The first micro-batch of the whole training."""

    def batches(self, step: int, counts: Counts) -> Iterator[tuple[Share, Any]]:
        """The micro-batches of this rank from this step on, on its device."""

    def close(self) -> None:
        """End the workers."""


def open_feed(task: Task, train: TrainSpec, plan: BatchPlan, world: World, device: torch.device) -> Feed:
    """Make the feed for the task's training set.

    Raises
    ------
    DataError
        The set is shorter than a global batch, or has no length and the job file does not say how many steps.
    """
    data = task.train_data()
    if isinstance(data, IterableDataset):
        from cluster_ddp.train.iterable import IterableFeed

        return IterableFeed(data, task, train, plan, world, device)
    return MapFeed(data, task, train, plan, world, device)


class MapFeed:
    """The feed of a map-style set."""

    def __init__(
        self, data: Dataset[Any], task: Task, train: TrainSpec, plan: BatchPlan, world: World, device: torch.device
    ) -> None:
        samples = _length(data)
        self.stream = SampleStream(samples, plan.global_batch, train.seed, train.drop_last)
        self.steps_per_epoch: int | None = self.stream.steps_per_epoch
        self.total_steps = train.steps or (train.epochs or 1) * self.stream.steps_per_epoch
        self._fetcher = Fetcher(data, task.collate, Use.SAMPLE, train.seed)
        self._plan, self._rank, self._workers, self._device = plan, world.rank, train.workers, device
        self._loader: Loader[Share] | None = None

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for batches."""
        return self._loader.waited if self._loader else 0.0

    def epoch(self, step: int) -> int:
        """The epoch that is under way when `step` steps are finished."""
        return self.stream.epoch(step)

    def consumed(self, step: int) -> int:
        """The sample offset when `step` steps are finished."""
        return self.stream.consumed(step)

    def first(self) -> tuple[Share, Any]:
        """The first micro-batch of the whole training."""
        share = next(rank_shares(self.stream, self._plan, self._rank, 0, 1))
        return next(iter(self._load(iter([share]), workers=0)))

    def batches(self, step: int, counts: Counts) -> Iterator[tuple[Share, Any]]:
        """The micro-batches of this rank from this step on, on its device."""
        shares = rank_shares(self.stream, self._plan, self._rank, step, self.total_steps)
        self._loader = self._load(shares, workers=self._workers)
        return iter(self._loader)

    def close(self) -> None:
        """End the workers."""
        if self._loader is not None:
            self._loader.close()

    def _load(self, shares: Iterator[Share], *, workers: int) -> Loader[Share]:
        return Loader(
            self._fetcher, shares, lambda share: (share.epoch, share.indices), workers=workers, device=self._device
        )


def _length(data: Dataset[Any]) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"train_data() gave a {type(data).__name__} without a length: "
            "give it __len__, or derive it from IterableDataset"
        ) from error
