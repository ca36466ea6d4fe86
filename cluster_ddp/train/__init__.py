"""What runs on a rank: the trainer, and each part of it for use in one's own script."""

from __future__ import annotations

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
from cluster_ddp.train.sampler import Permutation, SampleStream, Share, rank_shares
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
    "Share",
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
    "launch_distributed_training",
    "load_task",
    "rank_shares",
    "reduce_tensor",
    "setup_distributed",
]
