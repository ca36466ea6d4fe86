"""Starts of a Slurm job, and what happens in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from failure_causes import with_cause

from cluster_ddp.launch.keeper import beginning
from cluster_ddp.launch.keeper.deciding import decide_after
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.requeue.decision import Decision, record_decision
from cluster_ddp.slurm.start import SlurmStart, this_start


def start(job: str = "77", restart: int = 0, nodes: str = "n[1-3]") -> SlurmStart:
    found = this_start(
        {
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_JOB_NODELIST": nodes,
        }
    )
    assert found is not None
    return found


def attempts(run: RunDirectory, count: int) -> None:
    """Attempts that are over; their restart counts go on from those of before."""
    begun = len(list_attempts(run))
    for restart in range(begun, begun + count):
        begin_attempt(run, slurm_job_id="5", restart_count=restart, host="n1", pid=0, nodes=2, procs=1)


def begin(run: RunDirectory, *, job: str = "77", restart: int = 0) -> int:
    """Begin an attempt as this process; its number."""
    return beginning.begin(run, start(job, restart), pid=os.getpid()).number


def end(run: RunDirectory, number: int, *, restart: int = 0) -> Decision:
    attempt = run.attempt(number)
    decision = decide_after(attempt, start(restart=restart), writer="test")
    record_decision(attempt, decision, writer="test")
    return decision


def happened(run: RunDirectory, event: str, attempt: int = 0, **fields: Any) -> None:
    EventWriter(run, "rank-0").write(event, attempt=attempt, **with_cause(event, fields))


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put commands of Slurm's into PATH that answer what they are told to."""
    for name, text in programs.items():
        beside = folder / f".{name}.new"
        beside.write_text(f"#!/bin/sh\n{text}\n")
        beside.chmod(0o755)
        beside.replace(folder / name)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
