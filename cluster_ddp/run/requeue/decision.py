"""Decides what follows an attempt: done, a requeue, a stop, a failure or a stall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster_ddp.printing import say
from cluster_ddp.run import events
from cluster_ddp.run.attempt_record import AttemptRecord
from cluster_ddp.run.causes import describe_failure, root_failure
from cluster_ddp.run.condense import conclude
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.ending import LONGEST_START_SECONDS, Action, AttemptOutcome, Ending, finished_a_step, outcome_of
from cluster_ddp.run.errors import RunEnded, RunError
from cluster_ddp.run.events import EventWriter, login_writer
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.record import read_record
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.stopfile import PREEMPTION, TERMINATED

if TYPE_CHECKING:
    from pathlib import Path

    from cluster_ddp.job import JobSpec, RequeueSpec


@dataclass(frozen=True)
class Decision:
    """What to do, and why, in plain words."""

    # done: training is complete. requeue: restart it. stop: a person asked for it, or nobody knows who ended it. fail:
    # a restart would fail again. stall: too many starts, or too many without a new checkpoint
    action: Action
    why: str
    continued_by: str | None = None  # the next job of its chain


def decide(
    run: RunDirectory,
    attempt: AttemptDirectory,
    *,
    job_goes_on: Callable[[], bool] | None = None,
) -> Decision:
    """Decide what follows an attempt that has ended, from the run's events, its stop file and the limits in its job.

    Parameters
    ----------
    job_goes_on
        Asks whether Slurm lets the attempt's job keep running, or ends it only for now. Called only when a SIGTERM
        ended the attempt and its files do not say why: `scancel --signal=TERM` does not cancel the job.

    Raises
    ------
    RunError
        Storage does not let the events be read, which may pass.
    """
    history = read_history(run, strict=True)
    outcome = outcome_of(history, attempt.number)
    if (action := outcome.ending.final_action) is not None:
        return Decision(action, _why_at_start(history, outcome) or outcome.why)
    if outcome.stop_reason == TERMINATED and not (job_goes_on and job_goes_on()):
        # If it was a preemption after all, Slurm restarts the job by itself; if it was scancel, nothing may.
        return Decision("stop", "stopped by a SIGTERM of unknown origin")
    return _within_limits(history, attempt.number, outcome, _limits(run))


def decide_late(history: History, last: AttemptRecord) -> Decision | None:
    """Decide on an attempt that was killed before its keeper could; None if that is done or was forgiven by a resume.

    Raises
    ------
    RunEnded
        The run stalls.
    """
    if last.ended is not None or last.number < history.first_number:
        return None
    attempt = history.run.attempt(last.number)
    decision = decide(history.run, attempt)
    if decision.action == "stall":
        record_decision(attempt, decision, writer=login_writer())
        raise RunEnded(f"run {history.run.id} has stalled: {decision.why}", RunState.STALLED)
    return decision


def prepare_to_decide() -> None:
    """Import what `decide` needs ahead of time: once Slurm has sent SIGTERM, every second counts."""
    job_file_reader()


def record_decision(attempt: AttemptDirectory, decision: Decision, *, writer: str) -> None:
    """Write the decision's event, if it has one, and record that the attempt is over.

    Only requeue and stall have events of their own; for the others training has written one. An event that cannot be
    written (disk full) is reported on standard error: the decision still holds.
    """
    names = {"requeue": events.REQUEUED, "stall": events.STALLED}
    if decision.action in names:
        EventWriter(attempt.run, writer).write(names[decision.action], attempt=attempt.number, reason=decision.why)
    if not_noted := conclude(attempt):
        say(f"cluster-ddp: {not_noted}")


def _why_at_start(history: History, outcome: AttemptOutcome) -> str | None:
    if outcome.ending is not Ending.FAILED_AT_START:
        return None
    early = f"in its first {LONGEST_START_SECONDS / 60:.0f} minutes"
    when = early if history.reports_nothing else "before the first finished step"
    return f"failed {when}, so it would fail again: {outcome.why}"


def _within_limits(history: History, number: int, outcome: AttemptOutcome, limits: RequeueSpec) -> Decision:
    # Starts of further jobs of a chain are not requeues.
    counted = [record for record in history.attempts if history.first_number <= record.number <= number]
    requeues = sum(record.restart_count > 0 for record in counted)
    if requeues >= limits.max_requeues:
        if link := _next_job(history, number):
            return Decision("stop", f"{outcome.why}; Slurm job {link} of its chain continues", link)
        often = "once" if requeues == 1 else f"{requeues} times"
        return _stalled(history, number, outcome, f"requeued {often}, the limit of requeue.max_requeues")
    idle = history.attempts_without_progress(number)
    if idle >= limits.max_without_progress:
        idle -= _preempted_at_start(history, number, idle)
    if idle >= limits.max_without_progress and _guard_applies(history, outcome):
        how = "failed" if history.reports_nothing else "ended without a new checkpoint"
        which = "the last attempt" if idle == 1 else f"{idle} attempts in a row"
        return _stalled(history, number, outcome, f"{which} {how}")
    return Decision("requeue", outcome.why)


def _next_job(history: History, number: int) -> str | None:
    own = next((record.slurm_job_id for record in history.attempts if record.number == number), None)
    return next_of_chain(history, own)


def next_of_chain(history: History, own: str | None) -> str | None:
    """Return the job that is queued behind a job; None if there is none, or if run.json cannot be read."""
    try:
        return history.next_of_chain(own, read_record(history.run).slurm_job_ids)
    except RunError:
        return None


def _preempted_at_start(history: History, number: int, idle: int) -> int:
    """Count those of the last `idle` attempts that Slurm preempted before their first step: that is no fault of theirs.

    If no node has started, something else may be wrong, too.
    """
    last = [record.number for record in history.attempts if record.number <= number][-idle:]
    started = (attempt for attempt in last if history.of_attempt(attempt, events.NODE_STARTED))
    preempted = (attempt for attempt in started if outcome_of(history, attempt).stop_reason == PREEMPTION)
    return sum(not finished_a_step(history, attempt) for attempt in preempted)


def _guard_applies(history: History, outcome: AttemptOutcome) -> bool:
    """Whether missing checkpoints mean anything: a script that does not use our trainer reports none."""
    return not history.reports_nothing or outcome.ending is not Ending.STOPPED


def _stalled(history: History, number: int, outcome: AttemptOutcome, what: str) -> Decision:
    counted = range(history.first_number, number + 1)
    names = (events.FAILED, events.RANK_FAILED, events.NODE_FAILED)
    failures = [event for event in history.events if event["event"] in names and event.get("attempt") in counted]
    if not failures:
        return Decision("stall", f"{what}; the last attempt: {outcome.why}")
    latest = max(int(event["attempt"]) for event in failures)
    last = root_failure([event for event in failures if event["attempt"] == latest])
    return Decision("stall", f"{what}; the last error: {describe_failure(last)}")


def _limits(run: RunDirectory) -> RequeueSpec:
    return job_file_reader()(run.job_file).requeue


def job_file_reader() -> Callable[[Path], JobSpec]:
    """The function that reads a run's job file."""
    from cluster_ddp.job import load_resolved  # loads pydantic, which is not needed to begin an attempt

    return load_resolved
