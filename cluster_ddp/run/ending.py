"""Classifies how an attempt ended, from the run's events and the attempt's stop file. No other module does."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal

from cluster_ddp.run.causes import came_from_outside, failures_of, lost_nodes, what_failed
from cluster_ddp.run.errors import RunEnded, resume_command, to_continue
from cluster_ddp.run.events import (
    CHECKPOINT,
    COMPLETED,
    FAILED,
    HANG,
    NODE_FAILED,
    NODE_FINISHED,
    NODE_LOST,
    NODE_TAKEN,
    PREEMPTED,
    RANK_FAILED,
    REQUEUE_FAILED,
    RESUMED,
    STALLED,
    STARTED,
    STOP_REQUESTED,
    STOPPED,
)
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.node_outcome import not_signed_off
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.stopfile import (
    AGENT_LOST,
    CANCEL,
    NODE_FAILURE,
    PERSON,
    PREEMPTION,
    TERMINATED,
    TIME_LIMIT,
    read_stop,
)

# The reasons for a stop, the most informative first. A SIGTERM reaches every process at once, so the ranks may have
# stopped for "terminated" before the keeper learned what it meant and wrote that to the stop file. Ranks whose
# agent was killed also get a SIGTERM, from the kernel.
_STOP_PRECEDENCE = (CANCEL, PERSON, PREEMPTION, TIME_LIMIT, NODE_FAILURE, AGENT_LOST)

# A block of `join_run` without a loop has no other phases.
_BEFORE_TRAINING = (Phase.STARTING.word, Phase.READY.word, Phase.EVALUATING.word)

Action = Literal["done", "requeue", "stop", "fail", "stall"]
"""What follows an attempt (see `cluster_ddp.run.requeue.decision.Decision`)."""

LONGEST_START_SECONDS = 600.0
_NAMED = 3


class Ending(enum.Enum):
    """How an attempt ended: a description, the state it leaves the run in, and what follows if that is always the same.

    That is so of ends after which only a person may restart the run; after the others the limits of the job decide.
    """

    COMPLETED = "is complete", RunState.COMPLETED, "done"
    CANCELLED = "was cancelled", RunState.CANCELLED, "stop"
    STALLED = "has stalled", RunState.STALLED, "stall"
    STOPPED_BY_PERSON = "was stopped by a person", RunState.STOPPED, "stop"
    STOPPED = "was stopped", RunState.STOPPED, None
    FAILED_AT_START = "failed at start-up", RunState.FAILED, "fail"
    FAILED = "failed", RunState.FAILED, None
    NOT_REQUEUED = "could not be requeued", RunState.FAILED, None
    HUNG = "hung", RunState.FAILED, None
    UNKNOWN = "left no record of its end", RunState.LOST, None

    def __init__(self, words: str, state: RunState, final_action: Action | None) -> None:
        self.words = words
        self.state = state
        self.final_action = final_action

    @property
    def final(self) -> bool:
        """Whether only a person may restart the run."""
        return self.final_action is not None


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended, and why, in plain words."""

    ending: Ending
    why: str
    stop_reason: str | None = None  # what asked it to stop, one of `stopfile.REASONS`; None if nothing did
    settled: bool = False  # an event of the run decides it, even if parts of the attempt are still alive


def outcome_of(history: History, number: int) -> AttemptOutcome:
    """Return how an attempt ended; for one that is still alive, how it would have ended if it died now.

    Everything that needs to know how a run ended calls this function: `status`, the decision about a requeue, and the
    refusal to begin another attempt.
    """
    if history.cancelled is not None:
        by = history.cancelled.get("by", "its owner")
        return AttemptOutcome(Ending.CANCELLED, f"cancelled by {by}", CANCEL, settled=True)
    completed = history.current(COMPLETED) or history.of_attempt(number, COMPLETED)
    if completed and not _has_failed_afterwards(history, number):
        return AttemptOutcome(Ending.COMPLETED, "training is complete", settled=True)
    if stalled := history.current(STALLED):
        return AttemptOutcome(Ending.STALLED, str(stalled.get("reason") or "no progress"), settled=True)
    events = history.of_attempt(number)
    stop_reason, said_by = _stop_reason(history, number, events)
    if stop_reason == CANCEL:
        return AttemptOutcome(Ending.CANCELLED, "its job was cancelled", CANCEL)
    if stop_reason == PERSON:
        return AttemptOutcome(Ending.STOPPED_BY_PERSON, "stopped by " + (said_by or "a person"), PERSON)
    if refused := history.of_attempt(number, REQUEUE_FAILED):
        why = refused[-1].get("reason") or "Slurm did not take it"
        return AttemptOutcome(Ending.NOT_REQUEUED, f"requeue failed: {why}. {to_continue(history.run.path)}")
    failures = failures_of(history, number)
    own_fault = any(not came_from_outside(event) for event in failures)
    saved = any(event["event"] == STOPPED for event in events)
    hangs = [event for event in events if event["event"] == HANG]
    if stop_reason == HANG and hangs:  # the ranks woke up once it was found, and saved
        stop_reason = None
    if stop_reason is not None and (saved or not own_fault) and not _follows_a_failure(stop_reason, events, failures):
        return AttemptOutcome(Ending.STOPPED, f"stopped: {stop_reason}", stop_reason)
    failed = what_failed(history, number) or ""
    if hangs and not own_fault:  # a rank that has failed may not exit, because of a thread of its own
        return AttemptOutcome(Ending.HUNG, failed)
    if not own_fault and lost_nodes(history, number):  # errors on the other nodes are a consequence
        return AttemptOutcome(Ending.FAILED if failures else Ending.UNKNOWN, failed)
    if failures:
        comes_back = any(event.get("comes_back") is True for event in failures)
        at_start = comes_back or (own_fault and not _has_progressed(history, number))
        ending = Ending.FAILED_AT_START if at_start else Ending.FAILED
        return AttemptOutcome(ending, failed)
    asked = [str(event["by"]) for event in events if event["event"] == STOP_REQUESTED and event.get("by")]
    if asked:
        return AttemptOutcome(Ending.UNKNOWN, f"it was killed before it could save, after {asked[0]}")
    who = ", ".join(_never_signed_off(events)[:_NAMED]) or _with_batch_host(history, number)
    return AttemptOutcome(Ending.UNKNOWN, f"{who} left no record of its end (killed, or its node failed)")


def _never_signed_off(events: list[Event]) -> list[str]:
    """Return the hosts whose node programs have started but not signed off, if others have."""
    have_others = any(event["event"] == NODE_FINISHED for event in events)
    return [f"node {event['host']}" for event in not_signed_off(events) if have_others and event.get("host")]


def _with_batch_host(history: History, number: int) -> str:
    """Return what to call an attempt: with the host of its keeper, which has left no record either."""
    records = (record for record in history.attempts if record.number == number and record.slurm_job_id)
    return next((f"it (batch host {record.process.host})" for record in records if record.process), "it")


def outcome_so_far(history: History) -> AttemptOutcome | None:
    """Return the outcome of the last attempt since the last `resume`; None if none has begun since."""
    number = history.last_number
    if history.cancelled is None and (number is None or number < history.first_number):
        return None
    return outcome_of(history, number or 0)


def refuse_ended(history: History) -> None:
    """Raise `RunEnded` for a run that only a person may restart.

    Cheap: it does not load the job, so it uses the recorded decision of the stall guard instead of computing it again.
    """
    outcome = outcome_so_far(history)
    if outcome is None or not outcome.ending.final:
        return
    ending, run = outcome.ending, history.run
    refuse_complete(history)
    why = f": {outcome.why}" if ending in (Ending.STALLED, Ending.FAILED_AT_START) else ""
    raise RunEnded(
        f"run {run.id} {ending.words}{why}. It starts again only if you ask for it: {resume_command(run.path)}",
        ending.state,
    )


def refuse_complete(history: History) -> None:
    """Raise `RunEnded` for a run that is complete."""
    outcome = outcome_so_far(history)
    if outcome is not None and outcome.ending is Ending.COMPLETED:
        raise RunEnded(f"run {history.run.id} is complete: there is nothing left to train", RunState.COMPLETED)


def _has_failed_afterwards(history: History, number: int) -> bool:
    """Whether the program failed in what it did after its training was complete.

    That is another block of `join_run`; errors while the ranks of a complete training shut down do not count.
    """
    return any(event.get("phase") in _BEFORE_TRAINING for event in failures_of(history, number))


def _has_progressed(history: History, number: int) -> bool:
    """Whether any attempt since the last `resume`, up to this one, finished a step.

    For a script that reports nothing: whether one ran for longer than a start takes.
    """
    numbers = range(history.first_number, number + 1)
    if history.reports_nothing:
        return any(history.ran_for(attempt) > LONGEST_START_SECONDS for attempt in numbers)
    return any(finished_a_step(history, attempt) for attempt in numbers)


def finished_a_step(history: History, number: int) -> bool:
    """Whether an attempt finished a step of its own; never that of a script that reports nothing."""
    first: int | None = None
    logged = history.metrics.steps.get(number)
    reached = [logged] if logged is not None else []
    for event in history.of_attempt(number, STARTED, RESUMED, CHECKPOINT, STOPPED, FAILED, RANK_FAILED):
        step = as_whole(event.get("step"))
        if event["event"] in (STARTED, RESUMED):
            first = step if first is None else first
        elif step is not None:
            reached.append(step)
    return any(step > (first or 0) for step in reached)


def _follows_a_failure(stop_reason: str, events: list[Event], failures: list[Event]) -> bool:
    """Whether nobody asked for the stop: the rest of the attempt was ended because a part of it had failed."""
    names = {event["event"] for event in events}
    if stop_reason in (TERMINATED, NODE_FAILURE, AGENT_LOST) and names & {NODE_FAILED, NODE_LOST, NODE_TAKEN}:
        return True
    if stop_reason == PREEMPTION and NODE_LOST in names:  # Slurm shows no difference once the node is back
        return True
    return stop_reason == AGENT_LOST and bool(failures) and STOPPED not in names  # ranks failed before all had met


def _stop_reason(history: History, number: int, events: list[Event]) -> tuple[str | None, str]:
    """Return why the attempt was asked to stop, and by whom; the reason is None if nothing asked it to."""
    said: dict[str, Any] = {}
    for event in events:
        if event["event"] == STOPPED:
            said.setdefault(str(event.get("reason") or TERMINATED), event.get("by"))
        elif event["event"] == PREEMPTED:
            said.setdefault(PREEMPTION, None)
    request = read_stop(history.run.attempt(number))
    if request is not None and request.reason != HANG:  # a hang also ends the other nodes by the stop file
        said[request.reason] = request.by
    if not said:
        return None, ""
    reason = next((candidate for candidate in _STOP_PRECEDENCE if candidate in said), next(iter(said)))
    return reason, str(said[reason] or "")
