"""The job as the user wrote it: typed models, YAML loading, templates, overrides, errors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cluster_ddp.spec.errors import BatchError, ClusterDDPError, JobFileError

if TYPE_CHECKING:
    from cluster_ddp.spec.batch import BatchPlan, plan_batch
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

# Loaded when first asked for: whatever only needs the errors, such as beginning an attempt in a batch script, starts in
# a quarter of the time without pydantic and yaml.
_HOMES = {
    "BatchPlan": "batch",
    "CheckpointSpec": "models",
    "ContainerSpec": "models",
    "JobSpec": "models",
    "KeepBestSpec": "models",
    "LaunchSpec": "models",
    "LoadedJob": "loading",
    "LogSpec": "models",
    "NetworkSpec": "models",
    "ProfileSpec": "models",
    "RequeueSpec": "models",
    "ScalerSpec": "models",
    "SlurmSpec": "models",
    "TrainSpec": "models",
    "WandbSpec": "models",
    "dump_resolved": "loading",
    "load_job": "loading",
    "load_resolved": "loading",
    "plan_batch": "batch",
    "template_file": "templates",
    "template_names": "templates",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
