"""What tests of runs are made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cluster_ddp.job import JobSpec, dump_resolved
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.requeue.decision import Decision, decide, record_decision
from cluster_ddp.run.status.report import describe
from cluster_ddp.slurm.states import SlurmJob


def job(**settings: Any) -> JobSpec:
    return JobSpec(**{"name": "digits", "task": "cluster_ddp.tasks.digits:Digits", "train": {"steps": 300}, **settings})


def limited(run: RunDirectory, **limits: int) -> RunDirectory:
    """Give the run's job file other limits for requeues."""
    run.job_file.write_text(dump_resolved(job(requeue=limits)))
    return run


def begin(run: RunDirectory, **changes: Any) -> AttemptDirectory:
    """Begin an attempt whose process is this one."""
    return begin_attempt(run, **{"host": "here", "pid": os.getpid(), "nodes": 1, "procs": 2, **changes})


def begin_dead(run: RunDirectory, **changes: Any) -> AttemptDirectory:
    """Begin an attempt whose process is gone already: no process has the id 0."""
    return begin(run, **{"pid": 0, **changes})


def hide(run: RunDirectory, number: int) -> None:
    """Let an attempt look as if another machine had begun it."""
    path = run.attempt(number).record_file
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "host": "n7", "boot_id": "another machine", "started": "1"}))


def slurm_job(state: str, reason: str = "None", run_id: str | None = None) -> SlurmJob:
    """What squeue says about job 7."""
    return SlurmJob("7", state, reason, "", f"cluster_ddp {run_id}" if run_id else "(null)")


def fake_slurm(tmp_path: Path, name: str, body: str) -> Path:
    """A command of Slurm's that notes how it was called."""
    calls = tmp_path / f"{name}.calls"
    path = tmp_path / "bin" / name
    path.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{body}\n')
    path.chmod(0o755)
    return calls


def conclude(attempt: AttemptDirectory) -> Decision:
    """Judge an attempt and record the decision, as the keeper does."""
    decision = decide(attempt.run, attempt)
    record_decision(attempt, decision, writer="batch")
    return decision


def state_of(run: RunDirectory, slurm: dict[str, SlurmJob] | None = None) -> str:
    return describe(run, slurm).state.value
