"""What runs on a rank: the trainer, and each part of it for use in one's own script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.train.distributed import (
        World,
        all_gather,
        all_gather_object,
        barrier,
        broadcast_object,
        choose_backend,
        cleanup_distributed,
        is_main_process,
        reduce_tensor,
        setup_distributed,
    )
    from cluster_ddp.train.errors import DataError, DistributedError, NonFiniteError, TaskError, TrainError
    from cluster_ddp.train.metrics import MetricsFile
    from cluster_ddp.train.outcome import Outcome
    from cluster_ddp.train.randomness import StepSeeds
    from cluster_ddp.train.sampler import Permutation, SampleStream, Share, rank_shares
    from cluster_ddp.train.script import ScriptRun, join_run
    from cluster_ddp.train.spawn import launch_distributed_training
    from cluster_ddp.train.stop import Agreement, StopSignals
    from cluster_ddp.train.task import Task, load_task
    from cluster_ddp.train.trainer import Trainer

__all__ = [
    "Agreement",
    "DataError",
    "DistributedError",
    "MetricsFile",
    "NonFiniteError",
    "Outcome",
    "Permutation",
    "SampleStream",
    "ScriptRun",
    "Share",
    "StepSeeds",
    "StopSignals",
    "Task",
    "TaskError",
    "TrainError",
    "Trainer",
    "World",
    "all_gather",
    "all_gather_object",
    "barrier",
    "broadcast_object",
    "choose_backend",
    "cleanup_distributed",
    "is_main_process",
    "join_run",
    "launch_distributed_training",
    "load_task",
    "rank_shares",
    "reduce_tensor",
    "setup_distributed",
]

# Loaded when first asked for: login nodes list and export checkpoints, which takes no torch.
_HOMES = {
    "Agreement": "stop",
    "DataError": "errors",
    "DistributedError": "errors",
    "MetricsFile": "metrics",
    "NonFiniteError": "errors",
    "Outcome": "outcome",
    "Permutation": "sampler",
    "SampleStream": "sampler",
    "ScriptRun": "script",
    "Share": "sampler",
    "StepSeeds": "randomness",
    "StopSignals": "stop",
    "Task": "task",
    "TaskError": "errors",
    "TrainError": "errors",
    "Trainer": "trainer",
    "World": "distributed",
    "all_gather": "distributed",
    "all_gather_object": "distributed",
    "barrier": "distributed",
    "broadcast_object": "distributed",
    "choose_backend": "distributed",
    "cleanup_distributed": "distributed",
    "is_main_process": "distributed",
    "join_run": "script",
    "launch_distributed_training": "spawn",
    "load_task": "task",
    "rank_shares": "sampler",
    "reduce_tensor": "distributed",
    "setup_distributed": "distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
