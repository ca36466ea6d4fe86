"""A run's events and attempts, read once and put in order: what states, verdicts and goodput are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cluster_ddp.run.attempt_record import AttemptRecord, list_attempts, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import CANCELLED, CHECKPOINT, CHECKPOINT_DAMAGED, RESUME_REQUESTED, read_events

Event = dict[str, Any]


@dataclass(frozen=True)
class History:
    """What happened to a run so far.

    Attributes
    ----------
    run
        The run.
    events
        All events, by time.
    attempts
        The records of all attempts, by number.
    """

    run: RunDirectory
    events: tuple[Event, ...]
    attempts: tuple[AttemptRecord, ...]

    @property
    def last(self) -> AttemptRecord | None:
        """The latest attempt; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @cached_property
    def _resume_request(self) -> Event | None:
        return next((event for event in reversed(self.events) if event["event"] == RESUME_REQUESTED), None)

    @cached_property
    def first_number(self) -> int:
        """Number of the first attempt since a person last asked to resume; those before it are forgiven."""
        request = self._resume_request
        if request is None:
            return 0
        if request.get("attempt") is not None:
            return int(request["attempt"]) + 1
        return 1 + max((one.number for one in self.attempts if one.begun <= request["time"]), default=-1)

    @cached_property
    def cancelled(self) -> Event | None:
        """The event of the owner's cancelling, unless a person has asked to resume since."""
        request = self._resume_request
        since = request["time"] if request else 0.0
        found = (one for one in reversed(self.events) if one["event"] == CANCELLED and one["time"] >= since)
        return next(found, None)

    def of_attempt(self, number: int, *names: str) -> list[Event]:
        """The events of one attempt by time; only those of the given names, if any are given."""
        return [one for one in self.events if one.get("attempt") == number and (not names or one["event"] in names)]

    def current(self, name: str) -> Event | None:
        """The last event of that name of an attempt since a person last asked to resume."""
        found = (one for one in reversed(self.events) if one["event"] == name)
        return next((one for one in found if (one.get("attempt") or 0) >= self.first_number), None)

    def attempts_without_progress(self, upto: int) -> int:
        """How many attempts, counted back from `upto`, ended without a checkpoint of a new step.

        Attempts before a person's last request to resume do not count; nor does a checkpoint of step 0.
        """
        idle = 0
        saved: set[int] = set()
        best = 0
        for number in range(upto + 1):
            for event in self.of_attempt(number, CHECKPOINT, CHECKPOINT_DAMAGED):
                step = event.get("step")
                if not isinstance(step, int):
                    continue
                if event["event"] == CHECKPOINT:
                    saved.add(step)
                else:
                    saved.discard(step)
                    best = min(best, max(saved, default=0))
            newest = max(saved, default=0)
            if number >= self.first_number:
                idle = 0 if newest > best else idle + 1
            best = newest
        return idle


def read_history(run: RunDirectory) -> History:
    """Read a run's events and attempts as they are now."""
    attempts = tuple(read_attempt(attempt) for attempt in list_attempts(run))
    return History(run, tuple(read_events(run)), attempts)


def as_step(value: Any) -> int | None:
    """A step from an event or a metrics line; None when it is no whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
