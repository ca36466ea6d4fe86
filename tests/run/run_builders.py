"""What tests of runs are made of."""

from __future__ import annotations

import os
from typing import Any

from cluster_ddp.job import JobSpec
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory


def job(**settings: Any) -> JobSpec:
    return JobSpec(**{"name": "digits", "task": "cluster_ddp.tasks.digits:Digits", "train": {"steps": 300}, **settings})


def begin(run: RunDirectory, **changes: Any) -> AttemptDirectory:
    """Begin an attempt whose process is this one."""
    return begin_attempt(run, **{"host": "here", "pid": os.getpid(), "nodes": 1, "procs": 2, **changes})


def begin_dead(run: RunDirectory, **changes: Any) -> AttemptDirectory:
    """Begin an attempt whose process is gone already: no process has the id 0."""
    return begin(run, **{"pid": 0, **changes})
