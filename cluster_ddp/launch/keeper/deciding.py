"""Deciding what follows an attempt that has ended, in the time that storage and the end of the job leave for that.

The *decision* is about the run, which is done, or is to be requeued, stopped, failed or stalled: it is made from the
run's records, by `cluster_ddp.run.requeue.decision`. The *job action* is what this start of the job does then: end,
requeue or fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cluster_ddp.launch.keeper.allocation import Allocation
from cluster_ddp.launch.keeper.bad_hosts import bad_hosts
from cluster_ddp.launch.keeper.batch_host import BatchHost, say
from cluster_ddp.launch.keeper.end_of_job import EndOfJob
from cluster_ddp.launch.keeper.lost_nodes import record_lost_nodes
from cluster_ddp.launch.keeper.patience import PASSING_SECONDS, storage_error
from cluster_ddp.launch.keeper.script_outcome import record_script_outcome
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.ending import Action
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.history import read_history
from cluster_ddp.run.requeue.decision import Decision, decide
from cluster_ddp.slurm.job_info import CANCEL
from cluster_ddp.slurm.start import SlurmStart

DECIDE_SECONDS = 60.0
_HURRIED_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_UNDECIDED = "what follows could not be decided"

JobAction = Literal["end", "requeue", "fail"]


@dataclass(frozen=True)
class KeptStart:
    """How a start of the job ended.

    Attributes
    ----------
    job_action
        end: the job is over, as intended. requeue: it is requeued. fail: it is over, and has failed.
    action
        The decision about the run: done, stop, requeue, fail or stall.
    why
        The reason, in plain words.
    """

    job_action: JobAction
    action: Action
    why: str


@dataclass(frozen=True)
class AttemptDecision:
    """What could be decided about an attempt that has ended.

    Attributes
    ----------
    decision
        What the run's records ask for; None if it could not be found out.
    why
        The reason for the decision, or that there is none, in plain words.
    bad_hosts
        Hosts to avoid.
    cannot_decide
        Whether SIGKILL is near, this host has lost the run directory, or its storage does not respond. A start that
        therefore could not decide is followed by one that can.
    """

    decision: Decision | None
    why: str
    bad_hosts: list[str]
    cannot_decide: bool

    @property
    def action(self) -> Action | None:
        return self.decision.action if self.decision else None


def job_action_for(action: Action | None, *, reason: str | None, cannot_decide: bool) -> JobAction:
    """Determine what happens to the job, given the decision about the run.

    Parameters
    ----------
    action
        The decision; None if none could be made.
    reason
        Why Slurm ends the job; None if it does not.
    cannot_decide
        See `AttemptDecision`.
    """
    if action in ("done", "stop"):
        return "end"
    if action == "requeue" or (action is None and cannot_decide):
        return "end" if reason == CANCEL else "requeue"  # a cancelled job is never brought back
    return "fail"


def decide_after(
    attempt: AttemptDirectory, start: SlurmStart | None, *, job_goes_on: Callable[[], bool] | None = None, writer: str
) -> Decision:
    """Decide what follows an attempt whose processes have ended. Records why it ended, but not the decision.

    Parameters
    ----------
    job_goes_on
        See `cluster_ddp.run.requeue.decision.decide`.
    writer
        The name under which this process writes events.
    """
    events = EventWriter(attempt.run, writer)
    record_script_outcome(attempt, events)
    if start is not None:
        record_lost_nodes(read_history(attempt.run), attempt, events)
    return decide(attempt.run, attempt, job_goes_on=job_goes_on)


class Decider:
    """Decides about an attempt on the batch host.

    Parameters
    ----------
    host_name
        What Slurm calls this host.
    writer
        The name under which this process writes events.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        allocation: Allocation,
        host: BatchHost,
        end: EndOfJob,
        *,
        host_name: str,
        writer: str,
    ) -> None:
        self._attempt = attempt
        self._allocation = allocation
        self._host = host
        self._end = end
        self._host_name = host_name
        self._writer = writer
        self._given_up = False

    def decide(self, *, storage_answers: bool) -> AttemptDecision:
        """Decide what follows, as far as this host can.

        Parameters
        ----------
        storage_answers
            Whether storage has responded so far; if not, it is not asked.
        """
        found = self._within_time() if storage_answers else None
        self._given_up = True
        if found is None and self._end.out_of_time():
            return AttemptDecision(None, f"{_UNDECIDED} before Slurm kills the job", [], cannot_decide=True)
        if found is None:
            why = f"{_UNDECIDED}: storage does not respond on {self._host_name}"
            return AttemptDecision(None, why, [], cannot_decide=True)
        decision, why, bad = found
        lost = [self._host_name] if self._has_lost_run() else []
        bad = [*bad, *(host for host in lost if host not in bad)]
        return AttemptDecision(decision, why, bad, cannot_decide=self._end.out_of_time() or bool(lost))

    def _within_time(self) -> tuple[Decision | None, str, list[str]] | None:
        least = 0.0 if self._host.waits_for_storage else _HURRIED_SECONDS
        seconds = min(DECIDE_SECONDS, max(least, self._end.seconds_left()))
        return self._host.within(seconds, self._decide, unless=self._end.has_come_too_near)

    def _decide(self) -> tuple[Decision | None, str, list[str]]:
        """Decide about the run and which hosts it should avoid; the decision is None if an error prevents it."""
        attempt, start = self._attempt, self._allocation.start
        until = self._host.now() + PASSING_SECONDS
        while True:
            try:
                decision = decide_after(attempt, start, job_goes_on=self._end.job_goes_on, writer=self._writer)
                goes_on = decision.action == "requeue" or decision.continued_by
                bad = bad_hosts(read_history(attempt.run), attempt.number) if goes_on else []
                return decision, decision.why, bad
            except Exception as error:  # such an error would recur, unlike storage that does not respond
                if self._given_up:  # the keeper goes on without an answer
                    return None, _UNDECIDED, []
                if storage_error(error) is None or self._host.now() > until:
                    say(f"cannot decide what follows attempt {attempt.number}: {error}")
                    said = str(error).splitlines() or [type(error).__name__]
                    return None, f"{_UNDECIDED}: {said[0]}", []
            self._host.sleep(_RETRY_SECONDS)

    def _has_lost_run(self) -> bool:
        """Whether this host cannot write the run directory: Slurm would end a start here before it could begin."""
        run = self._attempt.run
        if self._allocation.start is None:
            return False
        if self._host.within(_HURRIED_SECONDS, lambda: os.access(run.events, os.W_OK | os.X_OK)) is not False:
            return False
        say(f"{run.path} cannot be written on {self._host_name}")
        return True
