"""What the ways of starting a run have in common."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.printing import say, say_if_storage_is_slow
from cluster_ddp.slurm.commands import SlurmError, SubmissionUnclear, cancel_job

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec
    from cluster_ddp.run.directory import RunDirectory


class SubmitError(ClusterDDPError):
    """The job cannot be submitted as asked."""


class Submission(Protocol):
    """A job that is ready to be sent: a dry run prints the same object that a submission sends."""

    via: str
    """Its name in the run's record."""

    @property
    def to_slurm(self) -> bool:
        """Whether it goes to Slurm."""

    remarks: tuple[str, ...]
    """Remarks for the user about how the job file was read."""

    @property
    def batch_script(self) -> str:
        """The batch script; empty if there is none."""

    def check(self) -> None:
        """Raise a ClusterDDPError for everything that can be known to fail before there is a run directory."""

    def send(self, run: RunDirectory) -> str | None:
        """Send it for a run whose directory exists, and note the job there; return its id, or None without Slurm."""


def start_run(spec: JobSpec, submission: Submission) -> tuple[RunDirectory, str | None]:
    """Make the run directory of a new run and submit it.

    Raises
    ------
    ClusterDDPError
        A check failed, the run cannot be written, or the batch system refuses it; nothing is left behind then. Or
        somebody has cancelled the run meanwhile.
    SlurmError
        It is not known whether the job is in the queue; then the run directory stays, so that the job finds it.
    """
    from cluster_ddp.run.runs import create_run, runs_dir_of  # not needed by a dry run

    runs_dir = runs_dir_of(spec)
    check_writable(runs_dir)
    submission.check()
    run = create_run(spec, runs_dir=runs_dir, via=submission.via, script=submission.batch_script or None)
    try:
        job_id = submission.send(run)
    except SubmissionUnclear as error:
        raise SlurmError(f"{error}\nIts run directory stays: {run.path}") from error
    except ClusterDDPError:
        # A run that was never in the queue would only confuse. It is seconds old and contains nothing of value.
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    note_submitted(run, submission.via, job_id)
    withdraw_if_cancelled(run, job_id, cancels=0)
    return run, job_id


def as_program(main: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], int]:
    """Turn a `main` into one that prints an error for the user and returns the exit status, 0 without an error."""

    @functools.wraps(main)
    def program(arguments: Sequence[str]) -> int:
        try:
            main(arguments)
        except ClusterDDPError as error:
            say(f"cluster-ddp: {error}")
            return error.exit_status
        return 0

    return program


def note_submitted(run: RunDirectory, via: str, job_id: str | None) -> None:
    """Record a submission in the run's events."""
    from cluster_ddp.run.events import SUBMITTED, EventWriter, login_writer

    EventWriter(run, login_writer()).write(SUBMITTED, via=via, slurm_job_id=job_id)


def withdraw_if_cancelled(run: RunDirectory, job_id: str | None, *, cancels: int) -> None:
    """Remove a job from the queue if its run was cancelled before the job was noted where `cancel` looks.

    Parameters
    ----------
    cancels
        How often the run had been cancelled when it was decided to submit it.

    Raises
    ------
    SubmitError
        The run was cancelled.
    """
    from cluster_ddp.run.errors import to_continue
    from cluster_ddp.run.history import read_history

    since = read_history(run).cancels[cancels:]
    if not since:
        return
    job = ""
    if job_id is not None:
        try:
            cancel_job(job_id)
            job = f"; Slurm job {job_id} has been taken back out of the queue"
        except SlurmError as error:
            job = f"; Slurm job {job_id} may still be queued; if it starts, it exits at once ({error})"
    raise SubmitError(
        f"run {run.id} was cancelled by {since[-1].get('by')} while it was being submitted{job}.\n"
        f"{to_continue(run.path)}"
    )


@say_if_storage_is_slow
def check_writable(runs_dir: Path) -> None:
    """Raise a `SubmitError` unless runs can be created in a folder, which need not exist yet."""
    existing = runs_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    allowed = False
    with contextlib.suppress(OSError):
        allowed = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if not allowed:
        raise SubmitError(
            f"runs cannot be written to {runs_dir}: {existing} is not a folder that you can write.\n"
            "Set runs_dir in the job file, or CLUSTER_DDP_RUNS, to a folder on storage that all nodes share."
        )
