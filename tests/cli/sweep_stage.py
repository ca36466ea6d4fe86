"""What tests of sweeps call."""

from __future__ import annotations

from cli_stage import Slurm

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import COMPLETED, NODE_FINISHED, STARTED, EventWriter
from cluster_ddp.run.sweep import SweepDirectory, read_sweep
from cluster_ddp.submit.element import run_of_element

GRID = ("--grid", "train.lr=1e-3,1e-4", "--grid", "params.width=8,16")


def arrays(slurm: Slurm) -> list[str]:
    """The option --array of each submission."""
    return [word.removeprefix("--array=") for words in slurm.submissions() for word in words if "--array" in word]


def start(sweep: SweepDirectory, number: int, job: str) -> RunDirectory:
    """What the batch script of an element does at its start."""
    return run_of_element(sweep, read_sweep(sweep).elements[number], via="sbatch", job=job)


def end(run: RunDirectory, job: str, event: str) -> None:
    """Train, and end so."""
    attempt = begin_attempt(run, slurm_job_id=job, host="n1", pid=1, nodes=1, procs=1)
    writer = EventWriter(run, "rank-0")
    writer.write(STARTED, attempt=attempt.number, step=0, total_steps=20)
    writer.write(event, attempt=attempt.number, step=20, samples=640, error="ValueError: no")
    writer.write(NODE_FINISHED, attempt=attempt.number, node=0, outcome="done" if event == COMPLETED else "failed")
    end_attempt(attempt)
