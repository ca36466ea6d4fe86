"""Beginning and resuming attempts: each allocation or local start of a run is one, and only one is alive at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from cluster_ddp.printing import one_line
from cluster_ddp.run import events
from cluster_ddp.run.attempt_record import LAST_NUMBER, AttemptRecord, is_in_the_way, read_attempt
from cluster_ddp.run.directory import KEY_BYTES, AttemptDirectory, RunDirectory
from cluster_ddp.run.ending import refuse_ended
from cluster_ddp.run.errors import RunAlive, RunError, resume_command
from cluster_ddp.run.events import EventWriter, login_writer
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.liveness import identify, is_alive
from cluster_ddp.run.node_outcome import signed_off
from cluster_ddp.run.record import add_slurm_job, begin_as_copy, original_of, read_record, update_record
from cluster_ddp.run.requeue.decision import decide_late, record_decision
from cluster_ddp.run.stopfile import FINAL_REASONS, read_stop, request_stop
from cluster_ddp.run.storage import Storage, replace_file, write_json


def begin_attempt(
    run: RunDirectory,
    *,
    slurm_job_id: str | None = None,
    restart_count: int = 0,
    host: str,
    pid: int,
    nodes: int | None,
    procs: int | None,
    cluster: str | None = None,
    job_alive: Callable[[str], bool | None] | None = None,
    another_runs: Callable[[str], bool] | None = None,
    is_latest_start: Callable[[], bool] = lambda: False,
    given_up: Callable[[], bool] = lambda: False,
) -> AttemptDirectory:
    """Begin the next attempt of a run, or return the one that this process has already begun in this allocation.

    Parameters
    ----------
    slurm_job_id, restart_count
        The allocation, if it is Slurm's.
    host
        The name of this machine, for people.
    pid
        The process on this machine that lives as long as the attempt: the keeper (in a batch job, the process of the
        batch script), or the supervisor of a local start. When it ends, the attempt counts as ended.
    cluster
        What Slurm calls this cluster; None if unknown.
    job_alive
        Asks Slurm whether a different job is still alive; None if unknown. Called only when the previous attempt was
        begun by a different job on a different machine of this cluster and has left no sign of its end.
    another_runs
        Asks Slurm whether a job belongs to a different run: then this directory is a copy of that one, and what is
        alive is not its own. Called only when the previous attempt may be alive.
    is_latest_start
        Asks Slurm whether its count of the job's restarts is this one's. Called only when a later start seems to have
        begun an attempt.
    given_up
        Whether nobody waits for the attempt any longer, since storage held it up. Asked last, just before the attempt
        begins.

    Raises
    ------
    RunAlive
        Another attempt is alive, or may be, or belongs to a later start of the same job.
    RunEnded
        The run was cancelled, is complete, has stalled, was stopped by a person or failed at start-up, and nobody has
        asked to resume it since.
    RunError
        The run's folder cannot be read or written, or the attempt was given up.
    """
    run.refuse_links()
    history = read_history(run, strict=True)
    begin_as_copy(run, _count(history))
    process = identify(pid, host)
    last, decision = history.last, None
    while True:
        refuse_ended(history)
        if last is not None:
            same_job = slurm_job_id is not None and last.slurm_job_id == slurm_job_id
            # If a different process has begun it, Slurm, which has lost its latest state, counts from an older one.
            same_count = same_job and last.restart_count == restart_count
            if same_job and last.number >= history.first_number:
                if same_count and last.ended is None and last.process == process:
                    return run.attempt(last.number)
                _refuse_earlier_start(run, last, restart_count, is_latest_start)
            if not (same_count or is_earlier_start(last, slurm_job_id, restart_count)):
                same_cluster = None in (cluster, last.cluster) or cluster == last.cluster
                asks = (job_alive, another_runs) if same_cluster else (None, None)
                _make_sure_it_is_over(history, last, *asks)
            decision = decide_late(history, last)
        number = _next_number(history, last)
        record = AttemptRecord(number, time.time(), process, slurm_job_id, restart_count, nodes, procs, cluster=cluster)
        try:
            published = publish(run, record, given_up)
        except OSError as error:
            raise RunError(f"cannot begin an attempt in {run.attempts}: {error}") from error
        if published:
            break
        # Another process was first. Its folder is looked up by name: a listing may be stale on network storage.
        history, last = read_history(run, strict=True), read_attempt(run.attempt(number))
    if last is not None and decision is not None:
        record_decision(run.attempt(last.number), decision, writer=login_writer())
    _note_in_record(run, slurm_job_id, nodes, procs)
    if last is not None and last.number >= history.first_number:
        _take_over_stop(run.attempt(last.number), run.attempt(number))
    return run.attempt(number)


def _refuse_earlier_start(
    run: RunDirectory, last: AttemptRecord, restart_count: int, is_latest_start: Callable[[], bool]
) -> None:
    """Raise `RunAlive` in a start that storage has held up, or that was cut off from Slurm, until a later one began."""
    if last.restart_count > restart_count and not (last.ended is not None and is_latest_start()):
        raise RunAlive(
            f"this start of job {last.slurm_job_id} is out of date: Slurm has started the job again since, and attempt "
            f"{last.number} has begun. Nothing is started here; if that attempt is over: {resume_command(run.path)}"
        )


def _next_number(history: History, last: AttemptRecord | None) -> int:
    run = history.run
    number = last.number + 1 if last is not None else _count(history)
    while is_in_the_way(run.attempt(number)):
        number += 1
    if number > LAST_NUMBER:
        raise RunError(
            f"{run.attempt(LAST_NUMBER).path} has the highest number that an attempt can have. "
            "If it is not an attempt, remove it"
        )
    return number


def _note_in_record(run: RunDirectory, slurm_job_id: str | None, nodes: int | None, procs: int | None) -> None:
    try:
        if slurm_job_id is not None:
            add_slurm_job(run, slurm_job_id)
        update_record(run, nodes=nodes, procs=procs)
    except OSError as error:
        raise RunError(f"cannot write {run.record_file}: {error}") from error


def _take_back_resume(history: History, alive: AttemptRecord) -> None:
    """Take back the resume of a run whose attempt is alive, which Slurm could not say when it was requested.

    An attempt that somebody has ended is only late.
    """
    if alive.number < history.first_number and history.stop_request is None and not history.cancels:
        take_back_resume(history.run, alive.number)


def _take_over_stop(last: AttemptDirectory, attempt: AttemptDirectory) -> None:
    """Apply to this attempt a person's stop request that went to the previous one while this one began."""
    asked = read_stop(last)
    if asked is None or asked.reason not in FINAL_REASONS:
        return
    try:
        request_stop(attempt, reason=asked.reason, level=asked.level, by=asked.by)
    except OSError as error:
        raise RunError(
            f"{asked.by or 'a person'} has asked the run to stop, but the request cannot be copied to "
            f"{attempt.stop_file}: {error}"
        ) from error


def take_back_resume(run: RunDirectory, seen: int | None) -> None:
    """Record that a resume was refused; `seen` is the last attempt that there was when it was requested."""
    EventWriter(run, login_writer()).write(events.RESUME_REFUSED, attempt=seen)


def attempt_is_alive(history: History, record: AttemptRecord) -> bool | None:
    """Whether an attempt is alive, as far as can be determined without Slurm; None if unknown."""
    if record.ended is not None:
        return False
    with contextlib.suppress(RunError):
        known = read_record(history.run)
        if record.number < known.attempts_of_original or original_of(history.run, known) is not None:
            return False
    alive = is_alive(record.process) if record.process is not None else False
    if alive is not None:
        return alive
    if record.number < history.first_number:
        return False  # the person who resumed made sure of that
    return False if _has_signed_off(history, record) else None


def is_earlier_start(last: AttemptRecord, slurm_job_id: str | None, restart_count: int) -> bool:
    """Whether `last` belongs to an earlier start of the same job: Slurm restarts a job only once it has ended."""
    return slurm_job_id is not None and last.slurm_job_id == slurm_job_id and last.restart_count < restart_count


def request_resume(run: RunDirectory, *, by: str, seen: History | None = None) -> None:
    """Record that a person wants the run to continue.

    It clears cancelled, stalled, failed and stopped, and resets the stall guard and the count of requeues. The caller
    has made sure that no attempt is alive.

    Parameters
    ----------
    seen
        The run as it was before the caller made sure; by default as it is now. What has happened since is not cleared:
        an attempt that somebody else has begun meanwhile counts, and a cancellation holds.

    Raises
    ------
    RunError
        The event cannot be written.
    """
    seen = seen or read_history(run)
    begin_as_copy(run, _count(seen))
    writer = EventWriter(run, login_writer())
    if not writer.write(events.RESUME_REQUESTED, attempt=seen.last_number, by=by, cancels=len(seen.cancels)):
        raise RunError(f"cannot write to {run.events}, so the run cannot be resumed")


def _count(history: History) -> int:
    return 0 if history.last_number is None else history.last_number + 1


def publish(run: RunDirectory, record: AttemptRecord, given_up: Callable[[], bool]) -> bool:
    """Create the attempt's folder with its record in one step; return False if another process has taken the number.

    A folder cannot be renamed onto one that is not empty, so only one process wins, and no folder is ever seen without
    its record.
    """
    storage = Storage()
    draft = AttemptDirectory(run.attempts / f".begin-{os.urandom(6).hex()}")
    with contextlib.suppress(FileExistsError):
        storage.mkdir(run.attempts)  # somebody may have removed it
    storage.mkdir(draft.path)
    try:
        write_json(storage, draft.record_file, record.to_json())
        replace_file(storage, draft.rendezvous_key, os.urandom(KEY_BYTES), mode=0o600)
        if given_up():
            raise RunError(f"attempt {record.number} was abandoned before it began")
        storage.rename(draft.path, run.attempt(record.number).path)
    except (OSError, RunError) as error:
        storage.rmtree(draft.path)
        if isinstance(error, OSError) and run.attempt(record.number).record_file.exists():
            return False
        raise
    storage.fsync_dir(run.attempts)
    return True


def _make_sure_it_is_over(
    history: History,
    last: AttemptRecord,
    job_alive: Callable[[str], bool | None] | None,
    another_runs: Callable[[str], bool] | None,
) -> None:
    """Raise `RunAlive` unless the last attempt is over, as far as this machine and Slurm can tell.

    A resume that was requested because Slurm could not say that the attempt is alive is then taken back.
    """
    alive = attempt_is_alive(history, last)
    if alive is not False and last.slurm_job_id is not None and another_runs and another_runs(last.slurm_job_id):
        return
    if alive is None and last.slurm_job_id is not None and job_alive is not None:
        alive = job_alive(last.slurm_job_id)
    try:
        refuse_alive(history, last, alive)
    except RunAlive:
        _take_back_resume(history, last)
        raise


def refuse_alive(history: History, last: AttemptRecord, alive: bool | None) -> None:
    """Raise `RunAlive` if the last attempt is alive, or may be (None)."""
    if alive is False:
        return
    run = history.run
    where = f"host {one_line(last.process.host)}, process {last.process.pid}" if last.process else "an unknown host"
    job = f", Slurm job {last.slurm_job_id}" if last.slurm_job_id else ""
    if alive:
        raise RunAlive(
            f"run {run.id} is alive: attempt {last.number} on {where}{job}. Stop it first: cluster-ddp stop {run.path}"
        )
    raise RunAlive(
        f"run {run.id} may be alive: attempt {last.number} on {where}{job} left no record of its end and cannot be "
        f"checked from this machine. Make sure that it is gone, then: {resume_command(run.path)}"
    )


def _has_signed_off(history: History, record: AttemptRecord) -> bool:
    """Whether the attempt's own events say that it is over."""
    if history.of_attempt(record.number, events.COMPLETED, events.REQUEUED, events.STALLED):
        return True
    finished = signed_off(history.of_attempt(record.number))
    return record.nodes is not None and len(finished) >= record.nodes
