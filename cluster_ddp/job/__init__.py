"""The job as the user wrote it: typed models, YAML loading, templates, overrides, errors.

models, fields, sections, units    what a job file may contain: its keys, their types, durations
loading, document, merge, templates   from a file to a `JobSpec`; `extends:` and ``--set``
site, site_file                    the defaults of a site
batch                              how the global batch is divided
options, secrets, refusals, target   what a person may not write; whether the task or script exists
errors, report, nearest            what is wrong in a job file, and how it is described
grid, elements                     the elements of a sweep
public                             the public names

Errors and templates are imported immediately. The names of `cluster_ddp.job.public` are loaded on first use: importing
pydantic takes longer than everything that a command such as ``status`` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cluster_ddp.errors import ClusterDDPError as ClusterDDPError
from cluster_ddp.job.errors import BatchError as BatchError
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
