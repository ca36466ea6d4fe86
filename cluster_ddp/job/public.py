"""The public names of `cluster_ddp.job` that import pydantic and YAML."""

# mypy: implicit-reexport
# ruff: noqa: F401

from cluster_ddp.job.batch import BatchPlan, describe_training, plan_batch, scaled_lr
from cluster_ddp.job.loading import (
    LoadedJob,
    RunJob,
    Variants,
    dump_resolved,
    load_job,
    load_resolved,
    load_run_job,
    load_stored_variants,
    load_variant,
    load_variants,
)
from cluster_ddp.job.models import (
    CheckpointSpec,
    ContainerSpec,
    JobSpec,
    KeepBestSpec,
    LaunchSpec,
    LogSpec,
    NetworkSpec,
    NotifySpec,
    ProfileSpec,
    RequeueSpec,
    ScalerSpec,
    SlurmSpec,
    StorageSpec,
    TrainSpec,
    WandbSpec,
)
