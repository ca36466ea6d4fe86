"""Beginning the attempt of one start of the job, after Slurm was asked about those before it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable

from cluster_ddp.launch.keeper.batch_host import say
from cluster_ddp.launch.keeper.lost_nodes import record_lost_nodes
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import EventWriter, login_writer
from cluster_ddp.run.history import read_history
from cluster_ddp.run.jobs import may_belong
from cluster_ddp.run.record import is_of_original, read_record
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused, query_jobs
from cluster_ddp.slurm.control import show_job
from cluster_ddp.slurm.start import SlurmStart
from cluster_ddp.slurm.states import ACTIVE, SlurmJob

_QUEUE_SECONDS = 20.0
NO_ANSWER_SECONDS = 600.0  # for which Slurm is asked again: a controller that fails over is away for minutes
ASK_AGAIN_SECONDS = 5.0


def begin(
    run: RunDirectory, start: SlurmStart | None, *, pid: int, given_up: Callable[[], bool] = lambda: False
) -> AttemptDirectory:
    """Begin the attempt of this start; the same start of a Slurm job gets the same attempt again.

    Parameters
    ----------
    start
        The start of the Slurm job; None outside of Slurm, where the attempt has one node.
    pid
        The process that lives as long as the attempt.
    given_up
        See `begin_attempt`.

    Raises
    ------
    RunAlive, RunEnded, RunError
        As for `begin_attempt`.
    """
    procs = read_record(run).procs
    if start is None:
        return begin_attempt(run, host=socket.gethostname(), pid=pid, nodes=1, procs=procs, given_up=given_up)
    attempt = begin_attempt(
        run,
        slurm_job_id=start.task,
        restart_count=start.restart_count,
        host=start.batch_host or socket.gethostname(),
        pid=pid,
        nodes=start.nodes or None,
        procs=procs,
        cluster=start.cluster or None,
        job_alive=_job_is_active,
        another_runs=lambda job_id: _is_another_runs(run, job_id),
        is_latest_start=lambda: _is_latest(start),
        given_up=given_up,
    )
    if start.components > 1:
        say(
            f"Slurm job {start.job_id} has {start.components} components (#SBATCH hetjob), of which only the first "
            "trains: the nodes of the others stay idle until the job ends"
        )
    if attempt.number:
        record_lost_nodes(read_history(run), run.attempt(attempt.number - 1), EventWriter(run, login_writer()))
    return attempt


def _job_is_active(job_id: str) -> bool | None:
    """Whether Slurm lets processes of a job run; None if it cannot be queried.

    Without an answer nothing begins in this job, which may be the last one of its chain: so it is asked patiently.
    """
    until = time.monotonic() + NO_ANSWER_SECONDS
    while True:
        try:
            job = _job(job_id)
        except SlurmError as error:
            never = isinstance(error, SlurmRefused) or shutil.which("squeue") is None
            if never or time.monotonic() > until:
                return None
            time.sleep(ASK_AGAIN_SECONDS)
        else:
            return job is not None and job.state in ACTIVE


def _is_latest(start: SlurmStart) -> bool:
    """Whether Slurm counts no restart of the job after this one."""
    job = show_job(start.task, seconds=_QUEUE_SECONDS)
    return job is not None and job.restarts == str(start.restart_count)


def _is_another_runs(run: RunDirectory, job_id: str) -> bool:
    """Whether a job belongs to a different run, such as one of which this directory is a copy, or to none."""
    record = read_record(run)
    if is_of_original(run, record, job_id):
        return True
    try:
        job = _job(job_id)
    except SlurmError:
        return False
    return job is not None and not may_belong(job, read_history(run), record)


def _job(job_id: str) -> SlurmJob | None:
    """Return a job; None if Slurm does not know it. Raises `SlurmError` if it cannot be queried."""
    return query_jobs([job_id], seconds=_QUEUE_SECONDS).get(job_id)
