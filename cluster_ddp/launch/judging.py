"""Judging an attempt that has ended: what follows it, in the time that storage and the job's end leave for that."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from cluster_ddp.launch.allocation import Allocation
from cluster_ddp.launch.attempt import PASSING_SECONDS, decide_after, storage_error
from cluster_ddp.launch.bad_hosts import suspects
from cluster_ddp.launch.batch_host import BatchHost, say
from cluster_ddp.launch.end_of_job import EndOfJob
from cluster_ddp.run.decision import Decision
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.history import read_history
from cluster_ddp.slurm.job_info import CANCEL

DECIDE_SECONDS = 60.0
_HURRIED_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_UNDECIDED = "what follows could not be decided"

Follows = Literal["end", "start again", "fail"]


@dataclass(frozen=True)
class KeptStart:
    """How a start of the job ended.

    Attributes
    ----------
    follows
        end: the job is over, as intended. start again: it is requeued. fail: it is over, and has failed.
    action
        What was decided about the run: done, stop, requeue, fail or stall.
    why
        The reason, in plain words.
    """

    follows: Follows
    action: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What was found about an attempt that has ended.

    Attributes
    ----------
    decision
        What the run's records ask for; None if it could not be found out.
    why
        The reason for the decision, or that there is none, in plain words.
    bad
        Hosts to avoid.
    cannot_decide
        Whether SIGKILL is near, this host has lost the run directory, or its storage does not respond. A start that
        therefore could not decide is followed by one that can.
    """

    decision: Decision | None
    why: str
    bad: list[str]
    cannot_decide: bool

    @property
    def action(self) -> str | None:
        return self.decision.action if self.decision else None


def what_follows(action: str | None, *, reason: str | None, cannot_decide: bool) -> Follows:
    """Determine what happens to the job, given the decision about the run.

    Parameters
    ----------
    action
        The decision; None if none could be made.
    reason
        Why Slurm ends the job; None if it does not.
    cannot_decide
        See `Verdict`.
    """
    if action in ("done", "stop"):
        return "end"
    if action == "requeue" or (action is None and cannot_decide):
        return "end" if reason == CANCEL else "start again"  # the owner wanted it to end
    return "fail"


class Judge:
    """Judges an attempt on the batch host.

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

    def judge(self, *, storage_answers: bool) -> Verdict:
        """Find out what follows.

        Parameters
        ----------
        storage_answers
            Whether storage has responded so far; if not, it is not asked.
        """
        found = self._within_time() if storage_answers else None
        self._given_up = True
        if found is None and self._end.out_of_time():
            return Verdict(None, f"{_UNDECIDED} before Slurm kills the job", [], cannot_decide=True)
        if found is None:
            why = f"{_UNDECIDED}: storage does not respond on {self._host_name}"
            return Verdict(None, why, [], cannot_decide=True)
        decision, why, bad = found
        lost = [self._host_name] if self._has_lost_run() else []
        bad = [*bad, *(host for host in lost if host not in bad)]
        return Verdict(decision, why, bad, cannot_decide=self._end.out_of_time() or bool(lost))

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
                bad = suspects(read_history(attempt.run), attempt.number) if goes_on else []
                return decision, decision.why, bad
            except Exception as error:  # such an error would recur, unlike storage that does not respond
                if self._given_up:  # what follows has been said
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
