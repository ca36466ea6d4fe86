"""Determines which state a run is in, and why, from its own events and from what Slurm says about its job."""

from __future__ import annotations

import time

from cluster_ddp.run import events
from cluster_ddp.run.attempt import attempt_is_alive
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import AttemptOutcome, Ending, outcome_of, outcome_so_far
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.keeper_at_work import is_deciding, waits_for_requeue, why_delayed
from cluster_ddp.run.reading import as_whole, read_tail
from cluster_ddp.run.record import RunRecord, original_of
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.stopfile import TERMINATED
from cluster_ddp.run.via import LAUNCH, LOCAL, QUEUED, SBATCH
from cluster_ddp.slurm.reasons import in_words
from cluster_ddp.slurm.states import ACTIVE, SUSPENDED, WAITING, SlurmJob
from cluster_ddp.words import moment

_NEVER_BEGAN = "it should have started on this machine and has not"
_LOCAL_START_SECONDS = 60.0
_BATCH_KILLED = ("RaisedSignal", "JobLaunchFailure")  # Slurm's reason once a batch process was killed; 22.05 the latter
_LONGEST_OUTPUT = 4096  # bytes at the end of it that are read
_LONGEST_QUOTE = 300


def state_of(
    history: History, record: RunRecord | None, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """Return state and reason: what the run's events settle, else what is alive, else how the last attempt ended."""
    outcome = outcome_so_far(history)
    if outcome is not None and outcome.settled:
        return outcome.ending.state, None if outcome.ending is Ending.COMPLETED else outcome.why
    if job is not None and job.state in SUSPENDED:
        return RunState.SUSPENDED, "suspended by Slurm; it continues where it is when Slurm resumes it"
    if job is not None and job.state in ACTIVE:
        starting = waits_for(history, record, job.job_id) if job.state == "RUNNING" else None
        ending = _cleaning_up(history, outcome) if job.state == "COMPLETING" else None
        return RunState.RUNNING, waits_for_requeue(history) or _stopping(history) or starting or ending
    if job is not None and job.held:
        return RunState.HELD, how_to_release(job)
    if job is not None and job.state in WAITING:
        failed = failed_start(history, record, job.job_id, queued=True)
        return _waiting(outcome, job, failed or _failed_link(history, record, ids, job.job_id))
    cancelled = job is not None and job.state == "CANCELLED"
    if ids and not cancelled and (failed := failed_start(history, record, ids[-1], queued=False)):
        return RunState.FAILED, failed
    return _without_slurm(history, record, job, answered=answered, ids=ids)


def _waiting(outcome: AttemptOutcome | None, job: SlurmJob, failed: str | None) -> tuple[RunState, str | None]:
    """Return state and reason of a run in the queue: why it was requeued, and what Slurm says it is waiting for."""
    said = in_words(job.reason)
    if job.starts is not None:
        said = f"{said or 'in the queue'}; Slurm expects it to start at {moment(job.starts)}"
    state, why = (RunState.PENDING, failed) if outcome is None else (RunState.REQUEUED, failed or outcome.why)
    if why is None:
        return state, said
    return state, f"{why} (Slurm: {said})" if said else why


def _without_slurm(
    history: History, record: RunRecord | None, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """Return state and reason of a run without Slurm, or whose job Slurm does not know, or could not be asked about."""
    last = history.current_attempt
    if last is None:
        if not ids and _should_have_begun(history, record):
            before = history.last
            return (
                _ended(history, record, before.number, job, answered=answered, ids=ids)
                if before
                else (RunState.LOST, _NEVER_BEGAN)
            )
        return _never_began(history, record, job, answered=answered, ids=ids)
    if not answered and last.slurm_job_id and (delayed := waits_for_requeue(history)):
        return RunState.RUNNING, delayed  # its nodes have signed off, its keeper has not
    if not answered and last.slurm_job_id and is_deciding(history):
        return (
            RunState.RUNNING,
            "its nodes have finished; what follows is being decided, and Slurm cannot be queried here",
        )
    alive = attempt_is_alive(history, last)
    if alive or (alive is None and not (answered and last.slurm_job_id)):
        if delayed := waits_for_requeue(history):
            return RunState.RUNNING, delayed
        remark = None if alive else _unseen(last.slurm_job_id, last.process.host if last.process else "?")
        said_to_be_over = history.of_attempt(last.number, events.STOPPED, events.FAILED, events.REQUEUED)
        if alive or not said_to_be_over:
            return RunState.RUNNING, _stopping(history) or remark
    return _ended(history, record, last.number, job, answered=answered, ids=ids)


def _should_have_begun(history: History, record: RunRecord | None) -> bool:
    """Whether a local run was started a while ago: its attempt begins within moments, or never."""
    if record is None or record.via != LOCAL:
        return False
    wished = max((float(event["time"]) for event in history.resume_requests), default=record.created)
    return time.time() - wished > _LOCAL_START_SECONDS


def _never_began(
    history: History, record: RunRecord | None, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    if job is not None:  # Slurm has ended it
        state = RunState.CANCELLED if job.state == "CANCELLED" else RunState.LOST
        said = _last_output(history, record, job)
        return state, f"Slurm job {job.job_id} ended as {_end_by_slurm(job)} before an attempt started {said}"
    if record is not None and record.submitting is not None:
        return not_in_queue(history.run, record, answered=answered)
    if ids and answered:
        return RunState.LOST, (
            f"Slurm no longer knows job {ids[-1]} (another cluster's may), and no attempt has started. To continue: "
            f"cluster-ddp resume {history.run.path}"
        )
    if ids:
        return RunState.PENDING, f"Slurm cannot be queried about job {ids[-1]} from here"
    if record is not None and record.via in QUEUED:
        return RunState.PENDING, "not submitted yet"
    if record is not None and record.via == LAUNCH:
        return RunState.PENDING, "its nodes are waiting for each other, or still have to be started"
    return RunState.PENDING, None


def _ended(
    history: History, record: RunRecord | None, number: int, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """Return state and reason once the last attempt is over, from how it ended and what Slurm did then."""
    outcome: AttemptOutcome = outcome_of(history, number)
    cancelled = job is not None and job.state == "CANCELLED"
    if not cancelled and (delayed := why_delayed(history)):  # the keeper was killed while retrying
        return RunState.FAILED, f"requeue failed: {delayed}. To continue: cluster-ddp resume {history.run.path}"
    requeued = history.of_attempt(number, events.REQUEUED)
    came_to_nothing = requeued and not outcome.ending.final  # if no further attempt begins
    if came_to_nothing and not answered and history.attempts[-1].slurm_job_id:
        return RunState.REQUEUED, str(requeued[-1].get("reason") or outcome.why)
    if job is not None and cancelled and requeued and outcome.ending is not Ending.STOPPED_BY_PERSON:
        return RunState.CANCELLED, f"Slurm job {job.job_id} was cancelled before it continued"
    last = history.attempts[-1]
    if job is not None and job.job_id == last.slurm_job_id and came_to_nothing:
        # Newer Slurm versions call a job PREEMPTED if it ever was, however its last start ended.
        storage = "The batch host may not have been able to use the run directory. "
        if job.state == "DEADLINE":
            storage = ""
        elif job.reason == "PartitionDown":
            storage = "Its partition was removed: add --set slurm.partition=NAME (sinfo -s). "
        elif job.state == "COMPLETED":  # no start that begins no attempt ends so: it was the last one's own exit
            storage = "Slurm has forgotten the requeue: its controller died before it had saved that. "
        return RunState.LOST, (
            f"{outcome.why}; its job was queued again, and ended as {_end_by_slurm(job)} before an "
            f"attempt started. {storage}To continue: cluster-ddp resume {history.run.path}"
        )
    decided = requeued or last.ended is not None or not (answered or outcome.stop_reason == TERMINATED)
    if outcome.ending is Ending.STOPPED and not cancelled and last.slurm_job_id and not decided:
        # Slurm ends the step of a batch process that is gone; whether training can still save is a race.
        ended = f"Slurm job {job.job_id} ended as {_end_by_slurm(job)}: " if job is not None else ""
        return RunState.LOST, (
            f"{ended}its keeper was killed before it had the job queued again; training {outcome.why}. To continue: "
            f"cluster-ddp resume {history.run.path}"
        )
    # A keeper that is killed within KillWait of a scancel may have recorded only what came before, such as the warning.
    unexplained = outcome.ending is Ending.UNKNOWN or (cancelled and outcome.ending is Ending.STOPPED)
    if job is None and answered and last.slurm_job_id and (outcome.ending is Ending.UNKNOWN or came_to_nothing):
        ended, queued = "ended long ago", ""
        if came_to_nothing:
            ended, queued = "was cancelled, or ended before an attempt started", "its job was queued again; "
        forgotten = (
            f"Slurm no longer knows its job {last.slurm_job_id}: it {ended}, or slurmctld was restarted without its "
            "saved state"
        )
        if record is not None:
            original = original_of(history.run, record) or (record.id if record.id != history.run.id else None)
            if original is not None:
                forgotten = f"this is a copy of {original}, and Slurm knows no job of the copy"
        return RunState.LOST, (
            f"{outcome.why}; {queued}{forgotten}. To continue: cluster-ddp resume {history.run.path}"
        )
    behind = ids[ids.index(last.slurm_job_id) + 1 :] if last.slurm_job_id in ids else []
    goes_on = outcome.ending in (Ending.STOPPED, Ending.FAILED, Ending.HUNG)  # unless somebody kept it from that
    if goes_on and answered and not requeued and behind:
        return outcome.ending.state, (
            f"{outcome.why}; Slurm job {behind[0]} of its chain was to continue it, and is no longer in the queue. To "
            f"continue: cluster-ddp resume {history.run.path}"
        )
    if goes_on and last.slurm_job_id and not cancelled and not decided:
        return outcome.ending.state, (
            f"{outcome.why}; its keeper was killed, or its node failed, before it had the job queued again. To "
            f"continue: cluster-ddp resume {history.run.path}"
        )
    if job is None or not unexplained:
        return outcome.ending.state, outcome.why
    if cancelled:
        return RunState.CANCELLED, f"Slurm job {job.job_id} was cancelled"
    killed = ": its keeper was killed" if job.reason.startswith(_BATCH_KILLED) else ""
    return RunState.LOST, (
        f"Slurm job {job.job_id} ended as {_end_by_slurm(job)}{killed}, and training left no record of its end "
        f"{see_output(record, job.job_id)}. To continue: cluster-ddp resume {history.run.path}"
    )


def _end_by_slurm(job: SlurmJob) -> str:
    """Return the state in which Slurm ended a job, with its reason if there is one."""
    return f"{job.state} (Slurm: {job.reason})" if job.reason not in ("", "None") else job.state


def _stopping(history: History) -> str | None:
    request, over = history.stop_request, history.last is None or history.last.ended is not None
    return f"stopping: {request.reason}" if request is not None and not over else None


def _cleaning_up(history: History, outcome: AttemptOutcome | None) -> str | None:
    """Say how the last attempt ended while its job holds nodes: an epilog, or what cannot be killed, may take long."""
    if outcome is None or history.last is None or history.last.ended is None:
        return None
    return f"{outcome.why}; Slurm is still ending its job (COMPLETING)"


def _unseen(job_id: str | None, host: str) -> str:
    if job_id:
        return f"Slurm cannot be queried about job {job_id} from here; this is its last known state"
    return f"started on {host}, which cannot be checked from here; this is its last known state"


def how_to_release(job: SlurmJob) -> str:
    """Say why Slurm holds a job, who can release it, and how."""
    why = job.state if job.reason in ("", "None") else job.reason
    if job.reason == "JobHeldAdmin":
        return f"an administrator holds Slurm job {job.job_id} ({why}); ask them for: scontrol release {job.job_id}"
    return f"Slurm holds job {job.job_id} ({why}); release it with: scontrol release {job.job_id}"


def see_output(record: RunRecord | None, job_id: str) -> str:
    """Say where a job's output is: the file's name in the run directory."""
    return f"(see {_output_name(record, job_id)})"


def _output_name(record: RunRecord | None, job_id: str) -> str:
    return QUEUED.get(record.via if record is not None else SBATCH, QUEUED[SBATCH]).format(job=job_id)


def _last_output(history: History, record: RunRecord | None, job: SlurmJob) -> str:
    """Quote the end of a job's output, for a job that has left no other word."""
    name = _output_name(record, job.job_id)
    try:
        lines = read_tail(history.run.path / name, _LONGEST_OUTPUT).decode(errors="replace").split("\n")
    except OSError:
        return f"(there is no {name})"
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    said = f"{name} is empty" if last is None else f"{name} ends with: {last[:_LONGEST_QUOTE]}"
    by_itself = job.state in ("COMPLETED", "FAILED")
    return f"({said}{'; a line of launch.setup may have ended the script' if by_itself else ''})"


def not_in_queue(run: RunDirectory, record: RunRecord, *, answered: bool) -> tuple[RunState, str]:
    """Return state and reason of a run without a known job: it is being submitted, or its submission was cut off.

    Parameters
    ----------
    answered
        Whether Slurm could be queried.
    """
    if record.busy:
        return RunState.PENDING, "not submitted yet"
    if not answered:
        return RunState.PENDING, "cannot check with Slurm from here whether it was submitted"
    return (
        RunState.LOST,
        f"it was about to be submitted and is not in the queue; cluster-ddp resume {run.path} submits it",
    )


def failed_start(history: History, record: RunRecord | None, job_id: str, *, queued: bool) -> str | None:
    """Return why the latest start of a job failed before its attempt began; None if it did not.

    Parameters
    ----------
    queued
        Whether to look for a failed start after which the job was requeued, or for one that was the last.
    """
    failed = _latest_failed(history, job_id)
    if failed is None or bool(failed.get("queued")) is not queued:
        return None
    host = str(failed.get("host") or "the batch host")
    word = "restart" if failed.get("restart_count") else "start"
    return f"{word} failed on {host}: {failed.get('reason')} {see_output(record, job_id)}"


def _failed_link(history: History, record: RunRecord | None, ids: list[str], job_id: str) -> str | None:
    """Return why the start of the job before this one in a chain failed; None if it did not, or before a `resume`."""
    before = ids[: ids.index(job_id)] if job_id in ids else []
    failed = _latest_failed(history, before[-1]) if before else None
    if failed is None or any(event["time"] > failed["time"] for event in history.resume_requests):
        return None
    return failed_start(history, record, before[-1], queued=False)


def waits_for(history: History, record: RunRecord | None, job_id: str) -> str | None:
    """Return what keeps a running job from training; None once its ranks train, or if unknown."""
    last = history.current_attempt
    if last is None or last.slurm_job_id not in (None, job_id) or history.of_attempt(last.number, events.REQUEUED):
        what = "still in launch.setup, starting Python or waiting for storage"
        return f"starting: no attempt yet, {what} {see_output(record, job_id)}"
    if last.nodes is None or history.of_attempt(last.number, events.STARTED, events.RESUMED):
        return None
    nodes = {event.get("node"): event for event in history.of_attempt(last.number, events.NODE_STARTED)}
    if (up := len(nodes)) >= last.nodes:
        reports_nothing = any(event.get("script") for event in nodes.values())
        return None if reports_nothing else "starting: all nodes have started, but their ranks do not train yet"
    return f"starting: {up} of {last.nodes} nodes have started so far {see_output(record, job_id)}"


def _latest_failed(history: History, job_id: str) -> Event | None:
    """Return the event of this job's latest failed start, if no attempt has begun in the job since."""
    failed = [event for event in history.events if event["event"] == events.START_FAILED]
    if not failed or str(failed[-1].get("slurm_job_id")) != job_id:
        return None
    last, restarts = history.last, as_whole(failed[-1].get("restart_count")) or 0
    begun = last is not None and last.slurm_job_id == job_id and last.restart_count >= restarts
    return None if begun else failed[-1]
