"""The job as the user wrote it: typed models, YAML loading, templates, overrides, errors."""

from __future__ import annotations

from cluster_ddp.spec.batch import BatchPlan, plan_batch
from cluster_ddp.spec.errors import BatchError, ClusterDDPError, JobFileError
from cluster_ddp.spec.models import (
    CheckpointSpec,
    ContainerSpec,
    JobSpec,
    KeepBestSpec,
    LaunchSpec,
    LogSpec,
    NetworkSpec,
    ProfileSpec,
    RequeueSpec,
    ScalerSpec,
    SlurmSpec,
    TrainSpec,
    WandbSpec,
)

__all__ = [
    "BatchError",
    "BatchPlan",
    "CheckpointSpec",
    "ClusterDDPError",
    "ContainerSpec",
    "JobFileError",
    "JobSpec",
    "KeepBestSpec",
    "LaunchSpec",
    "LogSpec",
    "NetworkSpec",
    "ProfileSpec",
    "RequeueSpec",
    "ScalerSpec",
    "SlurmSpec",
    "TrainSpec",
    "WandbSpec",
    "plan_batch",
]
