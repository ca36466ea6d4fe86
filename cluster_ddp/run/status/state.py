"""Determines which state a run is in, and why, from its own events and from what Slurm says about its job."""

from __future__ import annotations

from cluster_ddp.run import events
from cluster_ddp.run.attempt import attempt_is_alive
from cluster_ddp.run.attempt_record import AttemptRecord
from cluster_ddp.run.ending import AttemptOutcome, Ending, outcome_so_far
from cluster_ddp.run.history import History
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.facts import Facts
from cluster_ddp.run.status.final_state import final_state
from cluster_ddp.run.status.keeper_at_work import is_deciding, left_behind, waits_for_requeue
from cluster_ddp.run.status.silence import silent_nodes
from cluster_ddp.run.status.starting import (
    NEVER_BEGAN,
    failed_before,
    failed_start,
    never_began,
    should_have_begun,
    waits_for,
)
from cluster_ddp.run.status.waiting import how_to_continue, how_to_release, why_it_waits
from cluster_ddp.run.stopfile import FINAL_REASONS, PERSON
from cluster_ddp.slurm.states import ACTIVE, SUSPENDED, WAITING, SlurmJob


def state_of(facts: Facts) -> tuple[RunState, str | None]:
    """Return state and reason: what the run's events settle, else what is alive, else how the last attempt ended."""
    history, job, job_ids = facts.history, facts.job, facts.job_ids
    outcome = outcome_so_far(history)
    if outcome is not None and outcome.settled:
        said = [outcome.why] if outcome.ending is not Ending.COMPLETED else []
        return outcome.ending.state, "; ".join(filter(None, [*said, left_behind(history, job)])) or None
    if job is not None and job.state in SUSPENDED:
        return RunState.SUSPENDED, how_to_continue(job)
    if job is not None and job.state in ACTIVE:
        starting = waits_for(facts, job.job_id) if job.is_running else None
        if starting is not None and _no_attempt_may_follow(history):
            starting = f"stopping: its job is starting again, and will end before it trains ({starting})"
        ending = _still_there(history, outcome, job)
        return RunState.RUNNING, waits_for_requeue(history) or _stopping(history) or starting or ending
    if job is not None and job.held:
        return RunState.HELD, how_to_release(job)
    if job is not None and job.state in WAITING:
        failed = failed_start(facts, job.job_id, queued=True)
        return _waiting(outcome, job, failed or failed_before(facts, job.job_id))
    if job_ids and not facts.is_job_cancelled and (failed := failed_start(facts, job_ids[-1], queued=False)):
        return RunState.FAILED, failed
    return _without_slurm(facts)


def _waiting(outcome: AttemptOutcome | None, job: SlurmJob, failed: str | None) -> tuple[RunState, str | None]:
    """Return state and reason of a run in the queue: why it was requeued, and what Slurm says it is waiting for."""
    said = why_it_waits(job)
    state, why = (RunState.PENDING, failed) if outcome is None else (RunState.REQUEUED, failed or outcome.why)
    if why is None:
        return state, said
    return state, f"{why} (Slurm: {said})" if said else why


def _without_slurm(facts: Facts) -> tuple[RunState, str | None]:
    """Return state and reason of a run without Slurm, or whose job Slurm does not know, or could not be asked about."""
    history, last = facts.history, facts.history.current_attempt
    if last is None:
        if not should_have_begun(facts):
            return never_began(facts)
        return final_state(facts) if history.attempts else (RunState.LOST, NEVER_BEGAN)
    if not facts.answered and last.slurm_job_id and (delayed := waits_for_requeue(history)):
        return RunState.RUNNING, delayed  # its nodes have signed off, its keeper has not
    if not facts.answered and last.slurm_job_id and is_deciding(history):
        return (
            RunState.RUNNING,
            "its nodes have finished; what follows is being decided, and Slurm cannot be queried here",
        )
    alive = attempt_is_alive(history, last)
    if alive or (alive is None and not (facts.answered and last.slurm_job_id)):
        if delayed := waits_for_requeue(history):
            return RunState.RUNNING, delayed
        remark = None if alive else _unseen(history, last)
        said_to_be_over = history.of_attempt(last.number, events.STOPPED, events.FAILED, events.REQUEUED)
        if alive or not said_to_be_over:
            return RunState.RUNNING, _stopping(history) or remark
    return final_state(facts)


def _stopping(history: History) -> str | None:
    last, request = history.current_attempt, history.stop_request
    if request is None or last is None or last.ended is not None:
        return None
    asked = f"asked by {request.by or 'a person'}" if request.reason == PERSON else request.reason
    stopping = f"stopping: {asked}"
    return "; ".join(filter(None, [stopping, silent_nodes(history)]))  # which would not end


def _no_attempt_may_follow(history: History) -> bool:
    """Whether somebody has ended the run after its last attempt had ended, and nobody has resumed it since."""
    last = history.current_attempt
    request = history.stop_request if last is not None and last.ended is not None else None
    return request is not None and request.reason in FINAL_REASONS


def _still_there(history: History, outcome: AttemptOutcome | None, job: SlurmJob) -> str | None:
    """Say how the last attempt ended while its job holds nodes.

    An epilog, or what cannot be killed, may take long; or Slurm's controller was restarted as the job ended.
    """
    if outcome is None or history.last is None or history.last.ended is None:
        return None
    still = "is still ending its job (COMPLETING)" if job.is_completing else f"shows its job as {job.state}"
    return f"{outcome.why}; Slurm {still}"


def _unseen(history: History, last: AttemptRecord) -> str:
    """Say why only the last known state can be shown, and which nodes are silent: their machines may be down."""
    if last.slurm_job_id:
        here = f"Slurm cannot be queried about job {last.slurm_job_id} from here"
    else:
        here = f"started on {last.process.host if last.process else '?'}, which cannot be checked from here"
    return "; ".join(filter(None, [f"{here}; this is its last known state", silent_nodes(history)]))
