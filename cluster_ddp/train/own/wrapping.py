"""Refuses a model or an optimizer that is distributed over the ranks by something other than DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cluster_ddp.train.errors import TrainError

_SHARDED = {"DTensor", "FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine"}  # importing these takes seconds


def refuse_sharded(bare: Mapping[str, Any]) -> None:
    """Raise a `TrainError` for a model in FSDP, DeepSpeed or tensor parallelism, of which each rank holds a part."""
    for name, thing in bare.items():
        if isinstance(thing, nn.Module):
            kinds = {type(part).__name__ for part in (*thing.modules(), *thing.parameters())}
            if not _SHARDED.isdisjoint(kinds):
                raise TrainError(
                    f"{name} is sharded across the ranks, for example by FSDP (fully_shard), DeepSpeed or tensor "
                    "parallelism, but a checkpoint holds what is the same on all ranks: wrap the whole model in "
                    "DistributedDataParallel; or remove join_run(), and let the script resume from its own "
                    "checkpoints"
                )


def refuse_unobservable(bare: Mapping[str, Any]) -> None:
    """Raise a `TrainError` for an optimizer whose steps cannot be observed, such as one that lets ranks diverge."""
    for name, thing in bare.items():
        if isinstance(thing, Optimizer) and not hasattr(thing, "_optimizer_step_post_hooks"):
            raise TrainError(
                f"{name} is of type {type(thing).__name__}, which does not call torch.optim.Optimizer.__init__(), so "
                "its steps and its state cannot be seen: use an implementation that does; or, if it holds no state of "
                "its own, pass in the optimizer inside it"
            )


def refuse_single_process(things: Mapping[str, Any], world_size: int) -> None:
    """Raise a `TrainError` if Accelerate prepared things for one process although there are several ranks."""
    prepared = (getattr(thing, "accelerator_state", None) for thing in things.values())  # of its optimizers
    if world_size > 1 and any(getattr(state, "num_processes", None) == 1 for state in prepared):
        raise TrainError(
            f"Accelerate sees a single process where there are {world_size} ranks: on the CPU it uses several only "
            "with Accelerator(cpu=True), TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=true in the environment"
        )


def refuse_unwrapped(names: Mapping[str, bool]) -> None:
    """Raise a `TrainError` for a trained model that is not wrapped in DDP, on several ranks.

    Parameters
    ----------
    names
        The names of the trained models, with whether each is wrapped.
    """
    for name, is_wrapped in names.items():
        if not is_wrapped:
            raise TrainError(
                f"there are several ranks, and {name} is not in DistributedDataParallel: each rank would train its "
                f"own weights; pass in the wrapped {name}, which sums the gradients, and drop any all_reduce() of "
                "them from the loop"
            )
