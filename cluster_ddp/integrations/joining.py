"""Shared by the integrations: the run that a training belongs to, and which samples a step stands for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.data.batches import MapBatches, batches_of
from cluster_ddp.train.own.geometry import Geometry
from cluster_ddp.train.own.joining import join_run, joined_run
from cluster_ddp.train.own.run import ScriptRun


@contextlib.contextmanager
def run_of_training() -> Iterator[ScriptRun]:
    """The run of the surrounding `join_run` block; without one, a run that begins and ends with the training.

    Raises
    ------
    SystemExit
        There is no block, and the run was stopped or had already finished: code after the training must not run.
    """
    if (run := joined_run()) is not None:
        yield run
        return
    is_left = True
    with join_run() as run:
        yield run
        is_left = False
    if is_left:
        raise SystemExit(0) from None


@dataclass(frozen=True)
class FrameworkSteps(Geometry):
    """The steps of a framework's loop, which may end within an epoch.

    Attributes
    ----------
    limit
        Steps of the whole training.
    """

    limit: int

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.limit

    def expect_same_batches(self, was: dict[str, Any]) -> None:
        """Check that a step has the same samples as in the attempt that saved the checkpoint.

        Raises
        ------
        TrainError
            It does not; the message says what to change.
        """
        super().expect_same_batches(was)
        per_step = (self.batch or 1) * self.accumulate * self.world
        if was["world"] != self.world and (self.samples or 0) % per_step:
            raise TrainError(
                f"the checkpoint was saved by {was['world']} ranks, now there are {self.world}, and {self.samples} "
                f"samples are not a multiple of the {per_step} in a step: with several ranks, the last step of an "
                "epoch is filled up with samples from its beginning, so it would contain different samples; resume on "
                f"{was['world']} ranks, or start a new run with a data set whose size is a multiple"
            )


def map_batches(loader: Any, world_size: int, length: int | None = None) -> MapBatches:
    """The batches of a framework's training loader.

    Raises
    ------
    TrainError
        The order cannot be made a function of the epoch.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise TrainError(
            "ResumeExactly takes data sets with __len__ and __getitem__, and this one is an IterableDataset, whose "
            "place the framework does not keep: make it map-style, or write the loop with run.resumable()"
        )
    batches = batches_of(loader, world_size, length)
    assert isinstance(batches, MapBatches)
    return batches
