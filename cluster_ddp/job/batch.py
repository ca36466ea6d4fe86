"""Divides the global batch among ranks and accumulation steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster_ddp.job.errors import BatchError

if TYPE_CHECKING:
    from cluster_ddp.job.models import TrainSpec


@dataclass(frozen=True)
class BatchPlan:
    """The division: ``global_batch == world_size * accumulation_steps * micro_batch``, always exactly.

    Attributes
    ----------
    global_batch: samples per optimizer step, over all ranks and accumulation steps.
    world_size: number of ranks.
    accumulation_steps: forward/backward passes of one rank per optimizer step.
    micro_batch: samples of one forward/backward on one rank.
    """

    global_batch: int
    world_size: int
    accumulation_steps: int
    micro_batch: int


def plan_batch(train: TrainSpec, world_size: int, global_batch: int | None = None) -> BatchPlan:
    """Divide the global batch among `world_size` ranks.

    A pure function: the same settings, world size and global batch always give the same plan, so that a resumed attempt
    repeats the arithmetic of the previous one.

    Parameters
    ----------
    train: the settings. Without `train.global_batch` the global batch is
        ``batch_size * world_size * accumulation_steps``.
    world_size: number of ranks, at least 1.
    global_batch: the global batch of a run that has already begun. It is kept for the life of the run: micro-batch and
        accumulation adapt to it, `train.batch_size` is the upper limit of the micro-batch, and
        `train.accumulation_steps` is only where the search begins.

    Raises
    ------
    BatchError
        The global batch does not divide; the message names world sizes that would work.
    """
    begun = global_batch is not None
    total = global_batch or train.global_batch or _own_global_batch(train, world_size)
    if total % world_size:
        raise BatchError(_does_not_divide(total, world_size))
    share = total // world_size
    wish = train.accumulation_steps
    # Without a global batch in the job file, batch_size alone restores the requested accumulation.
    least = wish if wish is not None and train.global_batch is not None else 1
    steps = _accumulation(share, least, ceiling=train.batch_size or share)
    if not begun and wish is not None and steps != wish:
        raise BatchError(_accumulation_does_not_fit(train, total, world_size, wish))
    return BatchPlan(global_batch=total, world_size=world_size, accumulation_steps=steps, micro_batch=share // steps)


def scaled_lr(train: TrainSpec, global_batch: int) -> float:
    """Return the peak learning rate: `train.lr`, scaled by ``global_batch / base_batch`` per `train.lr_scaling`."""
    ratio = global_batch / (train.base_batch or global_batch)
    if train.lr_scaling == "linear":
        return train.lr * ratio
    if train.lr_scaling == "sqrt":
        return train.lr * math.sqrt(ratio)
    return train.lr


def describe_training(train: TrainSpec, plan: BatchPlan) -> str:
    """Describe a step for people: ranks, global batch and how it is divided, peak learning rate."""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    passes = f" x {plan.accumulation_steps} passes" if plan.accumulation_steps > 1 else ""
    return (
        f"{ranks}, global batch {plan.global_batch} ({ranks}{passes} x {plan.micro_batch} samples), "
        f"peak lr {scaled_lr(train, plan.global_batch):g}"
    )


def _own_global_batch(train: TrainSpec, world_size: int) -> int:
    if train.batch_size is None:
        raise BatchError("neither train.batch_size nor train.global_batch is set: give one of them")
    return train.batch_size * world_size * (train.accumulation_steps or 1)


def _accumulation(share: int, least: int, ceiling: int) -> int:
    """Return the fewest accumulation steps, `least` or more, that divide `share` and keep the micro-batch in bounds."""
    return next((steps for steps in _divisors(share) if steps >= least and share // steps <= ceiling), share)


def _divisors(number: int) -> list[int]:
    small = [low for low in range(1, math.isqrt(number) + 1) if number % low == 0]
    return small + [number // low for low in reversed(small) if low * low != number]


def _does_not_divide(total: int, world_size: int) -> str:
    fits = _divisors(total)
    below = [size for size in fits if size < world_size][-4:]
    above = [size for size in fits if size > world_size][:4]
    return (
        f"a global batch of {total} cannot be divided among {world_size} ranks\n"
        f"    world sizes near it that divide it: {', '.join(map(str, below + above))}\n"
        "    choose one of them (nodes times ranks on each), or another train.global_batch for a new run"
    )


def _accumulation_does_not_fit(train: TrainSpec, total: int, world_size: int, wish: int) -> str:
    ceiling = "" if train.batch_size is None else f" with train.batch_size: {train.batch_size}"
    return (
        f"a global batch of {total} on {world_size} ranks does not divide into {wish} accumulation steps{ceiling}\n"
        "    omit train.accumulation_steps to have it chosen, or change train.global_batch or train.batch_size"
    )
