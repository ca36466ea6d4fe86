"""The job as the user wrote it: typed models, YAML loading, templates, overrides, errors."""

from __future__ import annotations

from cluster_ddp.spec.batch import BatchPlan, plan_batch
from cluster_ddp.spec.errors import BatchError, ClusterDDPError, JobFileError
from cluster_ddp.spec.loading import LoadedJob, dump_resolved, load_job, load_resolved
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
from cluster_ddp.spec.templates import template_file, template_names

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
    "LoadedJob",
    "LogSpec",
    "NetworkSpec",
    "ProfileSpec",
    "RequeueSpec",
    "ScalerSpec",
    "SlurmSpec",
    "TrainSpec",
    "WandbSpec",
    "dump_resolved",
    "load_job",
    "load_resolved",
    "plan_batch",
    "template_file",
    "template_names",
]
