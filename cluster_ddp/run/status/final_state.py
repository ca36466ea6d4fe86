"""Determines the state of a run whose last attempt is over and that nothing continues.

How the attempt ended is `cluster_ddp.run.ending.outcome_of`. That is the state of the run, unless something should have
followed and did not, which Slurm and the record of the keeper show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from cluster_ddp.run import events
from cluster_ddp.run.attempt_record import AttemptRecord
from cluster_ddp.run.ending import AttemptOutcome, Ending, outcome_of
from cluster_ddp.run.errors import to_continue
from cluster_ddp.run.history import Event
from cluster_ddp.run.record import original_of
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.facts import Facts
from cluster_ddp.run.status.keeper_at_work import why_delayed
from cluster_ddp.run.status.starting import last_output
from cluster_ddp.run.stopfile import TERMINATED

Found = tuple[RunState, str]


def final_state(facts: Facts) -> tuple[RunState, str]:
    """Return state and reason of a run whose last attempt is over."""
    end = _End(facts)
    return next((found for rule in _RULES if (found := rule(end))), (end.outcome.ending.state, end.outcome.why))


@dataclass(frozen=True)
class _End:
    """The end of a run's last attempt, and what the rules below ask about it."""

    facts: Facts

    @cached_property
    def last(self) -> AttemptRecord:
        return self.facts.history.attempts[-1]

    @cached_property
    def outcome(self) -> AttemptOutcome:
        return outcome_of(self.facts.history, self.last.number)

    @cached_property
    def requeued(self) -> list[Event]:
        """The events that its job was requeued."""
        return self.facts.history.of_attempt(self.last.number, events.REQUEUED)

    @property
    def forgotten(self) -> bool:
        """Whether Slurm answers, but does not know the job."""
        return self.facts.job is None and self.facts.answered and self.last.slurm_job_id is not None

    @property
    def should_go_on(self) -> bool:
        """Whether the job is to be requeued, within its limits, after an end that the run has recorded."""
        return self.outcome.ending in (Ending.STOPPED, Ending.FAILED, Ending.HUNG)

    @property
    def keeper_was_killed(self) -> bool:
        """Whether the keeper of a Slurm job left no decision, and the job was not cancelled."""
        decided = self.requeued or self.last.ended is not None
        known = self.facts.answered or self.outcome.stop_reason == TERMINATED
        return self.last.slurm_job_id is not None and not self.facts.is_job_cancelled and known and not decided

    def lost(self, why: str) -> Found:
        return RunState.LOST, f"{why}. {self.advice}"

    @property
    def advice(self) -> str:
        return to_continue(self.facts.history.run.path)


def _not_requeued(end: _End) -> Found | None:
    """The keeper was killed while it tried to requeue the job."""
    delayed = None if end.facts.is_job_cancelled else why_delayed(end.facts.history)
    return (RunState.FAILED, f"requeue failed: {delayed}. {end.advice}") if delayed else None


def _never_restarted(end: _End) -> Found | None:
    """The job was requeued, and no further attempt began."""
    job, outcome = end.facts.job, end.outcome
    if not end.requeued:
        return None
    if not outcome.ending.final and not end.facts.answered and end.last.slurm_job_id:
        return RunState.REQUEUED, str(end.requeued[-1].get("reason") or outcome.why)
    if job is not None and end.facts.is_job_cancelled and outcome.ending is not Ending.STOPPED_BY_PERSON:
        return RunState.CANCELLED, f"Slurm job {job.job_id} was cancelled before it continued"
    if outcome.ending.final:
        return None
    if end.forgotten:
        gone = _why_forgotten(end, "was cancelled, or ended before an attempt started")
        return end.lost(f"{outcome.why}; its job was requeued; {gone}")
    if job is None or job.job_id != end.last.slurm_job_id:
        return None
    # Newer Slurm versions call a job PREEMPTED if it ever was, however its last start ended.
    output = last_output(end.facts)
    perhaps = f" {output}. If that does not say why, the batch host may not have been able to use the run directory"
    if job.state == "DEADLINE":
        perhaps = ""
    elif job.reason == "PartitionDown":
        perhaps = ". Its partition was removed: add --set slurm.partition=NAME (sinfo -s)"
    elif job.state == "NODE_FAIL":
        perhaps = ". A node of it failed, or its partition was removed (sinfo -s)"
    elif job.state == "COMPLETED":  # a start without an attempt never ends so: this was the exit of the last one
        perhaps = ". Slurm has forgotten the requeue: its controller died before it had saved that"
    how = f"{end.facts.how_the_job_ended()} before an attempt started"
    return end.lost(f"{outcome.why}; its job was requeued, and {how}{perhaps}")


def _stopped_without_keeper(end: _End) -> Found | None:
    """Training saved, or was about to; whether it could is a race, as Slurm ends the job step with its keeper."""
    if end.outcome.ending is not Ending.STOPPED or not end.keeper_was_killed:
        return None
    job = end.facts.job
    how = f"Slurm job {job.job_id} {end.facts.how_the_job_ended()}: " if job is not None else ""
    why = f"its keeper was killed before it requeued the job; training {end.outcome.why}"
    return end.lost(how + why)


def _chain_is_gone(end: _End) -> Found | None:
    """The next job of its chain should have continued it."""
    link = end.facts.next_of_chain
    if not end.should_go_on or not end.facts.answered or end.requeued or link is None:
        return None
    gone = f"Slurm job {link} of its chain was to continue it, and is no longer in the queue"
    return end.outcome.ending.state, f"{end.outcome.why}; {gone}. {end.advice}"


def _failed_without_keeper(end: _End) -> Found | None:
    if not end.should_go_on or not end.keeper_was_killed:
        return None
    why = "its keeper was killed, or its node failed, before it requeued the job"
    return end.outcome.ending.state, f"{end.outcome.why}; {why}. {end.advice}"


def _left_no_record(end: _End) -> Found | None:
    """Only Slurm may know how it ended."""
    job, ending = end.facts.job, end.outcome.ending
    # A keeper that is killed within KillWait of a scancel may have recorded only what came before, such as the warning.
    if ending is not Ending.UNKNOWN and not (end.facts.is_job_cancelled and ending is Ending.STOPPED):
        return None
    if end.forgotten:
        return end.lost(f"{end.outcome.why}; {_why_forgotten(end, 'ended long ago')}")
    if job is None:
        return None
    if end.facts.is_job_cancelled:
        return RunState.CANCELLED, f"Slurm job {job.job_id} was cancelled"
    killed = ": its keeper was killed" if job.batch_was_killed else ""
    if job.output_failed:
        killed += ", or Slurm could not open its output in the run directory"
    how = f"Slurm job {job.job_id} {end.facts.how_the_job_ended()}{killed}"
    return end.lost(f"{how}, and training left no record of its end {end.facts.see_output(job.job_id)}")


def _why_forgotten(end: _End, likely: str) -> str:
    """Return why Slurm may no longer know the job of the last attempt."""
    run, record = end.facts.history.run, end.facts.record
    if record is not None:
        original = original_of(run, record) or (record.id if record.id != run.id else None)
        if original is not None:
            return f"this is a copy of {original}, and Slurm knows no job of the copy"
    return (
        f"Slurm no longer knows its job {end.last.slurm_job_id}: it {likely}, or slurmctld was restarted without its "
        "saved state"
    )


_RULES: tuple[Callable[[_End], Found | None], ...] = (
    _not_requeued,
    _never_restarted,
    _stopped_without_keeper,
    _chain_is_gone,
    _failed_without_keeper,
    _left_no_record,
)
