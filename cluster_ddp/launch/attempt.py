"""Beginning an attempt, and deciding what follows when its processes have ended."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from cluster_ddp.launch.batch_host import BatchHost, say
from cluster_ddp.launch.lost_nodes import record_lost_nodes
from cluster_ddp.process import host_name
from cluster_ddp.run import node_outcome
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.events import (
    COMPLETED,
    NODE_FINISHED,
    NODE_STARTED,
    STOPPED,
    EventWriter,
    login_writer,
    read_events,
)
from cluster_ddp.run.history import read_history
from cluster_ddp.run.jobs import may_belong
from cluster_ddp.run.record import is_of_original, read_record
from cluster_ddp.run.stopfile import TERMINATED
from cluster_ddp.run.storage import FULL_ERRORS, PASSING_ERRORS
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused, query_jobs
from cluster_ddp.slurm.start import SlurmStart
from cluster_ddp.slurm.states import ACTIVE, SlurmJob

if TYPE_CHECKING:
    from cluster_ddp.run.decision import Decision

T = TypeVar("T")

ROOM_SECONDS = 900.0
PASSING_SECONDS = 45.0
"""For which storage may fail, other than by being full: its server may fail over or restart."""

_POLL_SECONDS = 1.0
_QUEUE_SECONDS = 20.0
_NO_ANSWER_SECONDS = 600.0  # for which Slurm is asked again: a controller that fails over is away for minutes
_ASK_AGAIN_SECONDS = 5.0
_SLOW_SECONDS = 10.0  # after which storage counts as hanging


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
        given_up=given_up,
    )
    if attempt.number:
        record_lost_nodes(read_history(run), run.attempt(attempt.number - 1), EventWriter(run, login_writer()))
    return attempt


def patiently(
    do: Callable[[], T],
    run: RunDirectory,
    *,
    host: BatchHost,
    pause: Callable[[float], None],
    unless: Callable[[], bool],
    too_near: Callable[[], bool],
    patience: float = ROOM_SECONDS,
) -> T | None:
    """Do what precedes an attempt, waiting while storage is full, fails or hangs: ending the job would end the run.

    Returns None if storage does not respond in that time.

    Parameters
    ----------
    unless
        Whether the job is ended; then storage is not waited for any longer, unless it responds within seconds.
    too_near
        Whether there is no time to wait at all.
    patience
        Seconds to wait for room, or for storage to respond. Other errors of storage either pass sooner or do not pass.
    """
    began, said = host.now(), False
    while True:
        tried = host.now()

        def hangs(tried: float = tried) -> bool:
            nonlocal said
            if too_near():
                return True
            if host.now() - tried < _SLOW_SECONDS:
                return False
            if not said:
                say(
                    f"the attempt cannot begin yet: storage ({run.path}), or Slurm, does not respond on {host_name()}; "
                    f"waiting for up to {patience / 60:.0f} min"
                )
            said = True
            return unless()

        try:
            return host.within(max(_SLOW_SECONDS, began + patience - tried), do, unless=hangs)
        except (RunError, OSError) as error:
            cause = storage_error(error)
            lasts = patience if cause is not None and cause.errno in FULL_ERRORS else min(patience, PASSING_SECONDS)
            if cause is None or host.now() - began > lasts or unless():
                raise
            if not said:
                say(f"{error}; retrying for up to {lasts:.0f} s")
            said = True
            pause(_POLL_SECONDS)


def storage_error(error: Exception) -> OSError | None:
    """Return the error of storage that an error is, or comes from, and that may pass; None if there is none."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in (*FULL_ERRORS, *PASSING_ERRORS) else None


def decide_after(
    attempt: AttemptDirectory, start: SlurmStart | None, *, job_goes_on: Callable[[], bool] | None = None, writer: str
) -> Decision:
    """Decide what follows an attempt whose processes have ended. Records why it ended, but not the decision.

    Parameters
    ----------
    job_goes_on
        See `cluster_ddp.run.decision.decide`.
    writer
        The name under which this process writes events.
    """
    from cluster_ddp.run.decision import decide

    events = EventWriter(attempt.run, writer)
    speak_for_script(attempt, events)
    if start is not None:
        record_lost_nodes(read_history(attempt.run), attempt, events)
    return decide(attempt.run, attempt, job_goes_on=job_goes_on)


def speak_for_script(attempt: AttemptDirectory, writer: EventWriter) -> None:
    """Record that a script has completed, or was stopped, if it has not done so itself.

    A script that does not use this package leaves no record of its end, so what its node programs saw is used.
    """
    events = [event for event in read_events(attempt.run) if event.get("attempt") == attempt.number]
    started = {event.get("node") for event in events if event["event"] == NODE_STARTED and event.get("script")}
    finished = {event.get("node"): event for event in events if event["event"] == NODE_FINISHED}
    said = {event["event"] for event in events}
    if not started or said & {COMPLETED, STOPPED} or started != set(finished):
        return
    outcomes = {event.get("outcome") for event in finished.values()}
    if outcomes == {node_outcome.DONE}:
        writer.write(COMPLETED, attempt=attempt.number, step=None)
    elif outcomes <= {node_outcome.DONE, node_outcome.STOPPED, node_outcome.KILLED}:
        reasons = [event["reason"] for event in finished.values() if event.get("reason")]
        writer.write(STOPPED, attempt=attempt.number, step=None, reason=reasons[0] if reasons else TERMINATED)


def _job_is_active(job_id: str) -> bool | None:
    """Whether Slurm lets processes of a job run; None if it cannot be queried.

    Without an answer nothing begins in this job, which may be the last one of its chain: so it is asked patiently.
    """
    until = time.monotonic() + _NO_ANSWER_SECONDS
    while True:
        try:
            job = _job(job_id)
        except SlurmError as error:
            never = isinstance(error, SlurmRefused) or shutil.which("squeue") is None
            if never or time.monotonic() > until:
                return None
            time.sleep(_ASK_AGAIN_SECONDS)
        else:
            return job is not None and job.state in ACTIVE


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
