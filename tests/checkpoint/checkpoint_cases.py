"""States to save, and checkpointers to save them with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.restore import Restored, load
from cluster_ddp.job import CheckpointSpec
from cluster_ddp.run.directory import step_name
from cluster_ddp.run.storage import Storage

RUN_ID = "digits-20260101-000000-abcd"


class Recorder(list[tuple[str, dict[str, Any]]]):
    """Takes events as the trainer's report does; none as long as it `refuses`."""

    refuses = False

    def __call__(self, event: str, fields: dict[str, Any]) -> bool:
        if not self.refuses:
            self.append((event, fields))
        return not self.refuses

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of all events of that name."""
        return [fields for name, fields in self if name == event]


def checkpointer(
    directory: Path,
    report: Recorder | None = None,
    storage: Storage | None = None,
    run_id: str = RUN_ID,
    **settings: Any,
) -> Checkpointer:
    """A single-process one."""
    return Checkpointer(
        directory,
        run_id=run_id,
        job_digest="digest",
        settings=CheckpointSpec(**settings),
        report=report if report is not None else Recorder(),
        storage=storage,
    )


def state(seed: int, size: int = 20) -> dict[str, Tensor]:
    """A small state with the names that a trainer gives, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, 3, generator=generator)
    return {
        "model.layer.weight": weight,
        "model.norm.running_mean": torch.randn(3, generator=generator),
        "model.norm.num_batches_tracked": torch.tensor(seed),
        "optimizer.layer.weight.exp_avg": torch.randn(size, 3, generator=generator),
        "optimizer.layer.weight.step": torch.tensor(float(seed)),
        "ema.layer.weight": torch.randn(size, 3, generator=generator),
    }


def save(
    target: Checkpointer, step: int, tensors: Mapping[str, Tensor], *, is_last: bool = False, **metrics: float
) -> None:
    """Save as the trainer does."""
    scalars = {"counts": {}, "scaler": None, "task": {}, "schedule": {"at": step}}
    counts = {"step": step, "samples": step * 8, "epoch": step // 100}
    target.save(**counts, tensors=tensors, scalars=scalars, metrics=metrics, is_last=is_last)


def blank(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Live tensors to restore into."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def restore(directory: Path, like: Mapping[str, Tensor]) -> tuple[Restored | None, dict[str, Tensor]]:
    """Restore with a new checkpointer, as a new attempt does."""
    live = blank(like)
    return checkpointer(directory).restore(live), live


def at_step(directory: Path, like: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """What the checkpoint of a step holds."""
    live = blank(like)
    load(directory / step_name(step), RUN_ID, live, lambda *_: None)
    return live


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bitwise equality of all tensors."""
    return one.keys() == other.keys() and all(equal_bits(one[name], other[name]) for name in one)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
