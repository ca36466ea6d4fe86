"""Tells why a run, or a start of its job, has not begun an attempt: it waits, or it failed before it could."""

from __future__ import annotations

import time
from pathlib import Path

from cluster_ddp.run import events
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import resume_command, to_continue
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.reading import as_whole, read_tail
from cluster_ddp.run.record import RunRecord
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.facts import Facts
from cluster_ddp.run.via import LAUNCH, LOCAL, QUEUED

NEVER_BEGAN = "it should have started on this machine, but has not"
_LOCAL_START_SECONDS = 60.0
_MAX_OUTPUT = 4096  # bytes at the end of it that are read
_MAX_QUOTE = 300


def should_have_begun(facts: Facts) -> bool:
    """Whether a local run was started a while ago: its attempt begins within moments, or never."""
    record = facts.record
    if facts.job_ids or record is None or record.via != LOCAL:
        return False
    wished = max((float(event["time"]) for event in facts.history.resume_requests), default=record.created)
    return time.time() - wished > _LOCAL_START_SECONDS


def never_began(facts: Facts) -> tuple[RunState, str | None]:
    """Return state and reason of a run without an attempt since the last `resume`, and without a living job."""
    run, record, job, job_ids = facts.history.run, facts.record, facts.job, facts.job_ids
    if job is not None:
        how = f"{facts.how_the_job_ended()} before an attempt started {last_output(facts)}"
        if facts.is_job_cancelled:
            return RunState.CANCELLED, f"Slurm job {job.job_id} {how}"
        return RunState.LOST, f"Slurm job {job.job_id} {how}. {to_continue(run.path)}"
    if record is not None and record.submitting is not None:
        return _not_in_queue(run, record, answered=facts.answered)
    if job_ids and facts.answered:
        return RunState.LOST, (
            f"Slurm job {job_ids[-1]} is no longer in the queue here, and no attempt has started in it. "
            f"{to_continue(run.path)}"
        )
    if job_ids:
        return RunState.PENDING, f"Slurm cannot be queried about job {job_ids[-1]} from here"
    if record is not None and record.via in QUEUED:
        return RunState.PENDING, "not submitted yet"
    if record is not None and record.via == LAUNCH:
        return RunState.PENDING, "its nodes are waiting for each other, or still have to be started"
    return RunState.PENDING, None


def _not_in_queue(run: RunDirectory, record: RunRecord, *, answered: bool) -> tuple[RunState, str]:
    """Return state and reason of a run that is being submitted, or whose submission was cut off."""
    if record.busy:
        return RunState.PENDING, "not submitted yet"
    if not answered:
        return RunState.PENDING, "cannot check with Slurm from here whether it was submitted"
    return (
        RunState.LOST,
        f"it was about to be submitted, but is not in the queue; {resume_command(run.path)} submits it",
    )


def last_output(facts: Facts) -> str:
    """Quote the end of a job's output, for a job that has left no other word, or none yet."""
    assert facts.job is not None
    name = facts.output_file(facts.job.job_id)
    last = _last_line(facts.history.run.path / name)
    other_cause = last is None or last.startswith("cluster-ddp:") or "slurmstepd: error:" in last
    by_itself = facts.job.ended_by_itself and not other_cause
    return f"({_quoted(last, name)}{'; a line of launch.setup may have ended the script' if by_itself else ''})"


def end_of_output(file: Path, name: str) -> str:
    """Quote the last line of a job's output; `name` is what to call its file."""
    return _quoted(_last_line(file), name)


def _last_line(file: Path) -> str | None:
    """Return the last line with anything in it, empty if there is none; None if there is no file."""
    try:
        lines = read_tail(file, _MAX_OUTPUT).decode(errors="replace").split("\n")
    except OSError:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _quoted(last: str | None, name: str) -> str:
    if last is None:
        return f"there is no {name}"
    return f"{name} ends with: {last[:_MAX_QUOTE]}" if last else f"{name} is empty"


def failed_start(facts: Facts, job_id: str, *, queued: bool) -> str | None:
    """Return why the latest start of a job failed before its attempt began; None if it did not.

    Parameters
    ----------
    queued
        Whether to look for a failed start after which the job was requeued, or for one that was the last.
    """
    failed = _latest_failed(facts.history, job_id)
    if failed is None or bool(failed.get("queued")) is not queued:
        return None
    host = str(failed.get("host") or "the batch host")
    word = "restart" if failed.get("restart_count") else "start"
    return f"{word} failed on {host}: {failed.get('reason')} {facts.see_output(job_id)}"


def failed_before(facts: Facts, job_id: str) -> str | None:
    """Return why the start of the job before this one in a chain failed; None if it did not, or before a `resume`."""
    ids = facts.job_ids
    before = ids[: ids.index(job_id)] if job_id in ids else []
    failed = _latest_failed(facts.history, before[-1]) if before else None
    if failed is None or any(event["time"] > failed["time"] for event in facts.history.resume_requests):
        return None
    return failed_start(facts, before[-1], queued=False)


def waits_for(facts: Facts, job_id: str) -> str | None:
    """Return what keeps a running job from training; None once its ranks train or have ended, or if unknown."""
    history, last = facts.history, facts.history.current_attempt
    if last is None or last.slurm_job_id not in (None, job_id) or history.of_attempt(last.number, events.REQUEUED):
        what = "still in Slurm's prolog, in launch.setup, starting Python or waiting for storage"
        return f"starting: no attempt yet, {what} {facts.see_output(job_id)}"
    if last.nodes is None or last.ended is not None or history.of_attempt(last.number, events.STARTED, events.RESUMED):
        return None
    nodes = {event.get("node"): event for event in history.of_attempt(last.number, events.NODE_STARTED)}
    if (up := len(nodes)) >= last.nodes:
        reports_nothing = any(event.get("script") for event in nodes.values())
        return None if reports_nothing else "starting: all nodes have started, but their ranks do not train yet"
    return f"starting: {up} of {last.nodes} nodes have started so far {last_output(facts)}"


def _latest_failed(history: History, job_id: str) -> Event | None:
    """Return the event of this job's latest failed start, if no attempt has begun in the job since."""
    failed = [event for event in history.events if event["event"] == events.START_FAILED]
    if not failed or str(failed[-1].get("slurm_job_id")) != job_id:
        return None
    last, restarts = history.last, as_whole(failed[-1].get("restart_count")) or 0
    begun = last is not None and last.slurm_job_id == job_id and last.restart_count >= restarts
    return None if begun else failed[-1]
