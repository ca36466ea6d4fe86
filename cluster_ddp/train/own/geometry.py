"""Which samples a step of a custom loop stands for, and whether a different attempt may resume from it."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass
from typing import Any

from cluster_ddp.train.errors import TrainError


def whole(name: str, value: Any, least: int = 0) -> int:
    """Check a number of epochs, steps or batches passed in by the program, and return it as an int.

    Raises
    ------
    TrainError
        It is not an integer, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        kind = type(value).__name__
        raise TrainError(f"{name} must be an integer, not {value!r} (of type {kind})") from error
    if number < least:
        raise TrainError(f"{name} must be at least {least}, not {number}")
    return number


@dataclass(frozen=True)
class Geometry:
    """How the samples of an epoch are divided into steps.

    Attributes
    ----------
    epochs
        Passes over the data.
    steps
        Steps per epoch.
    batch
        Samples per batch on one rank; None if batches have no fixed size.
    accumulate
        Batches per step on one rank.
    world
        Number of ranks.
    samples
        Length of the data set; None if it has none.
    """

    epochs: int
    steps: int
    batch: int | None
    accumulate: int
    world: int
    samples: int | None

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.epochs * self.steps

    def epoch(self, step: int) -> int:
        """The epoch under way after `step` steps."""
        return step // self.steps

    def consumed(self, step: int) -> int:
        """The sample offset after `step` steps."""
        per_epoch = self.steps * self._global
        if self.samples is not None and self.batch is not None:
            per_epoch = min(per_epoch, self.samples)
        epochs, within = divmod(step, self.steps)
        return epochs * per_epoch + min(within * self._global, per_epoch)

    def expect_same_batches(self, was: dict[str, Any]) -> None:
        """Check that a step has the same samples as in the attempt that saved the checkpoint.

        Raises
        ------
        TrainError
            It does not; the message says what to change.
        """
        now = asdict(self)
        has_own = was["world"] != self.world and None in (was["samples"], self.samples)  # one set per rank, now or then
        if was["samples"] != now["samples"] and not has_own:
            raise TrainError(
                f"the data set has {now['samples']} samples, but had {was['samples']} when the checkpoint was saved; "
                "the order depends on it: restore the data set, or start a new run"
            )
        if was["batch"] is None or self.batch is None:
            same = [was[key] == now[key] for key in ("batch", "world", "accumulate")]
        else:
            same = [was["batch"] * was["world"] * was["accumulate"] == self._global]
        if all(same) and was["steps"] == self.steps:
            return
        raise TrainError(
            f"the checkpoint was saved with {_layout(was)}, now there are {_layout(now)}: the steps would have "
            f"different samples{self._remedy(was)}"
        )

    @property
    def _global(self) -> int:
        return (self.batch or 1) * self.accumulate * self.world

    def _remedy(self, was: dict[str, Any]) -> str:
        if was["batch"] is None or self.batch is None:
            return "; resume with the same number of ranks"
        size, rest = divmod(was["batch"] * was["world"] * was["accumulate"], self.world * self.accumulate)
        if rest == 0 and size != self.batch:
            return f"; give the DataLoader batch_size={size}"
        return ""


@dataclass(frozen=True)
class Deal:
    """How the samples of an epoch are dealt out to the ranks.

    Attributes
    ----------
    sampler
        The name of the sampler that determines their order.
    samples
        How many all ranks take together; None if unknown.
    """

    sampler: str
    samples: int | None

    def changed(self, was: dict[str, Any], ranks: int) -> str | None:
        """The warning to give if the samples were dealt out differently on `ranks` ranks; None if there is none.

        Raises
        ------
        TrainError
            The order is different.
        """
        if was["sampler"] != self.sampler:
            raise TrainError(
                f"the checkpoint was saved by {_ranks(ranks)} with the sampler {was['sampler']}, but this number of "
                f"ranks uses {self.sampler}: the steps would have different samples. Give the DataLoader the same one "
                "on any number, as DistributedSampler(dataset, num_replicas=run.world.world_size, rank=run.world.rank)"
            )
        if None in (was["samples"], self.samples) or was["samples"] == self.samples:
            return None
        return (
            f"the ranks take {self.samples} samples in an epoch, and {_ranks(ranks)} took {was['samples']}: with "
            "several ranks, the last step of an epoch is filled up with samples from its beginning, or drops some, so "
            f"this step differs from the one on {_ranks(ranks)}. A data set whose size is a multiple of the number of "
            "ranks has the same steps on any of them"
        )


@dataclass(frozen=True)
class Draws:
    """Steps of a loop that samples its batches itself, about which nothing is known.

    Attributes
    ----------
    total
        Steps of the whole training.
    """

    total: int

    def epoch(self, step: int) -> int:
        """The epoch, always 0."""
        return 0

    def consumed(self, step: int) -> int:
        """The sample offset; only the number of steps is known."""
        return step

    def expect_same_batches(self, was: dict[str, Any]) -> None:
        """Does nothing: the loop itself determines its batches."""


def _layout(shape: dict[str, Any]) -> str:
    batch = "batches" if shape["batch"] is None else f"batches of {shape['batch']}"
    per_step = "" if shape["accumulate"] == 1 else f", {shape['accumulate']} to a step,"
    return f"{_ranks(shape['world'])} with {batch}{per_step} and {shape['steps']} steps per epoch"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
