"""The job as the user wrote it: typed models, YAML loading, templates, overrides, errors.

The errors are at hand at once. All else is loaded when first asked for: the models bring pydantic with them, which
costs more time than all that a command such as ``status`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster_ddp.spec.errors import BatchError, ClusterDDPError, JobFileError

if TYPE_CHECKING:
    from cluster_ddp.spec.batch import BatchPlan, plan_batch
    from cluster_ddp.spec.loading import LoadedJob, dump_resolved, load_job, load_resolved, unknown_keys
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
    "unknown_keys",
]

_MODULES = {
    "batch": ("BatchPlan", "plan_batch"),
    "loading": ("LoadedJob", "dump_resolved", "load_job", "load_resolved", "unknown_keys"),
    "templates": ("template_file", "template_names"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'models')}"), name)
    globals()[name] = value
    return value
