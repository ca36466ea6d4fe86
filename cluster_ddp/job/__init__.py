"""The job as the user wrote it: typed models, YAML loading, templates, overrides, errors.

Errors and templates are imported immediately. The names of `cluster_ddp.job.public` are loaded on first use: importing
pydantic takes longer than everything that a command such as ``status`` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cluster_ddp.job.errors import BatchError as BatchError
from cluster_ddp.job.errors import ClusterDDPError as ClusterDDPError
from cluster_ddp.job.errors import JobFileError as JobFileError
from cluster_ddp.job.templates import template_file as template_file
from cluster_ddp.job.templates import template_names as template_names

if TYPE_CHECKING:
    from cluster_ddp.job.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        public = importlib.import_module("cluster_ddp.job.public")
        if name in vars(public):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
