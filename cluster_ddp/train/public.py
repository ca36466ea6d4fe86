"""The public names of `cluster_ddp.train`, collected from its modules."""

# mypy: implicit-reexport
# ruff: noqa: F401

from cluster_ddp.train.data.order import MicroBatch, Permutation, SampleStream, rank_micro_batches
from cluster_ddp.train.errors import DataError, DistributedError, NonFiniteError, TaskError, TrainError
from cluster_ddp.train.metrics.file import MetricsFile
from cluster_ddp.train.own.joining import join_run
from cluster_ddp.train.own.run import ScriptRun
from cluster_ddp.train.randomness import StepSeeds
from cluster_ddp.train.ranks.distributed import (
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
from cluster_ddp.train.ranks.spawn import launch_distributed_training
from cluster_ddp.train.ranks.stop import StopConsensus, StopSignals
from cluster_ddp.train.session import Outcome
from cluster_ddp.train.task import Task, load_task
from cluster_ddp.train.trainer import Trainer
