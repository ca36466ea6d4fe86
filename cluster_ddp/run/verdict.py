"""What is to become of a run whose attempt has ended: the rule that the batch script acts on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import FAILED, RANK_FAILED, REQUEUED, RESUMED, STALLED, STARTED, EventWriter
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.outcome import Ending, Outcome, describe_failure, outcome_of, root_failure
from cluster_ddp.run.stopfile import TERMINATED

if TYPE_CHECKING:
    from cluster_ddp.spec import RequeueSpec

Action = Literal["done", "requeue", "stop", "fail", "stall"]


@dataclass(frozen=True)
class Verdict:
    """What to do, and why in words for people.

    Attributes
    ----------
    action
        done: training is complete. requeue: start again. stop: a person wanted it, or nobody knows who ended it.
        fail: starting again would fail again. stall: too many starts, or too many without a new checkpoint.
    """

    action: Action
    reason: str


def judge(
    run: RunDirectory,
    attempt: AttemptDirectory,
    *,
    requeue: RequeueSpec | None = None,
    job_runs: Callable[[], bool] | None = None,
) -> Verdict:
    """Judge an attempt that has ended, from the run's events and its stop file.

    Parameters
    ----------
    run, attempt
        The run, and its attempt that has ended.
    requeue
        The limits; by default those of the run's job file.
    job_runs
        Asks Slurm whether it lets the attempt's job run on. Called only when a SIGTERM ended the attempt and nobody
        knows why: `scancel --signal=TERM` is no scancel.
    """
    history = read_history(run)
    outcome = outcome_of(history, attempt.number)
    if outcome.ending is Ending.COMPLETED:
        return Verdict("done", outcome.reason)
    if outcome.ending in (Ending.CANCELLED, Ending.STOPPED_BY_PERSON):
        return Verdict("stop", outcome.reason)
    if outcome.stop_reason == TERMINATED and not (job_runs and job_runs()):
        # If it was a preemption after all, Slurm starts the job again by itself; if it was scancel, nothing may.
        return Verdict("stop", "stopped by a SIGTERM that nobody gave a reason for")
    if outcome.ending is Ending.FAILED_AT_START:
        return Verdict("fail", f"failed before the first finished step, so it would fail again: {outcome.reason}")
    return _within_limits(history, attempt.number, outcome, requeue or _limits(run))


def conclude(attempt: AttemptDirectory, *, writer: str, job_runs: Callable[[], bool] | None = None) -> Verdict:
    """Judge an attempt that has ended, and record the verdict under the name `writer`."""
    verdict = judge(attempt.run, attempt, job_runs=job_runs)
    record_verdict(attempt, verdict, writer=writer)
    return verdict


def record_verdict(attempt: AttemptDirectory, verdict: Verdict, *, writer: str) -> None:
    """Write the verdict's event, if it has one, and that the attempt is over.

    Of the verdicts, requeue and stall become events; the others have theirs from training. What cannot be written (a
    full disk) is said on standard error: the verdict still holds.
    """
    names = {"requeue": REQUEUED, "stall": STALLED}
    if verdict.action in names:
        EventWriter(attempt.run, writer).write(names[verdict.action], attempt=attempt.number, reason=verdict.reason)
    try:
        end_attempt(attempt)
    except OSError as error:
        print(f"cluster-ddp: cannot record the end of attempt {attempt.number}: {error}", file=sys.stderr)


def _within_limits(history: History, number: int, outcome: Outcome, limits: RequeueSpec) -> Verdict:
    requeues = number - history.first_number
    if requeues >= limits.max_requeues:
        return _stalled(history, number, f"requeued {requeues} times, as often as requeue.max_requeues allows")
    idle = history.attempts_without_progress(number)
    if idle >= limits.max_without_progress and _guard_applies(history, outcome):
        return _stalled(history, number, f"{idle} attempts in a row ended without a new checkpoint")
    return Verdict("requeue", outcome.reason)


def _guard_applies(history: History, outcome: Outcome) -> bool:
    """Whether missing checkpoints mean anything: a script that does not use our trainer reports none."""
    reports = any(event["event"] in (STARTED, RESUMED) for event in history.events)
    return reports or outcome.ending is not Ending.STOPPED


def _stalled(history: History, number: int, what: str) -> Verdict:
    counted = range(history.first_number, number + 1)
    failures = [
        event for event in history.events if event["event"] in (FAILED, RANK_FAILED) and event.get("attempt") in counted
    ]
    if not failures:
        return Verdict("stall", what)
    latest = max(int(event["attempt"]) for event in failures)
    last = root_failure([event for event in failures if event["attempt"] == latest])
    return Verdict("stall", f"{what}; the last error: {describe_failure(last)}")


def _limits(run: RunDirectory) -> RequeueSpec:
    from cluster_ddp.spec import load_resolved  # loads pydantic, which beginning an attempt does without

    return load_resolved(run.job_file).requeue
