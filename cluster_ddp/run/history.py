"""A run's events and attempts, read once and ordered: what states, decisions and goodput are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cluster_ddp.run import node_outcome
from cluster_ddp.run.attempt_record import AttemptRecord, list_attempts, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import (
    CANCELLED,
    CHECKPOINT,
    CHECKPOINT_DAMAGED,
    NODE_FINISHED,
    NODE_STARTED,
    RESUME_REFUSED,
    RESUME_REQUESTED,
    RESUMED,
    START_REFUSED,
    STARTED,
    STOPPED,
    read_events,
)
from cluster_ddp.run.lineage import Lineage, read_lineage
from cluster_ddp.run.metrics import LatestMetrics, read_latest
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.stopfile import StopRequest, read_stop

Event = dict[str, Any]


@dataclass(frozen=True)
class History:
    """What has happened to a run so far."""

    run: RunDirectory
    events: tuple[Event, ...]
    attempts: tuple[AttemptRecord, ...]

    @property
    def last(self) -> AttemptRecord | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def last_number(self) -> int | None:
        """The number of the last attempt, by its events if somebody has removed the folders of all attempts."""
        if self.last is not None:
            return self.last.number
        return max((event["attempt"] for event in self.events if event["event"] == NODE_STARTED), default=None)

    @property
    def current_attempt(self) -> AttemptRecord | None:
        """The last attempt, unless the run was resumed since."""
        return self.last if self.last is not None and self.last.number >= self.first_number else None

    @cached_property
    def stop_request(self) -> StopRequest | None:
        """The stop request of the last attempt, from anybody."""
        return read_stop(self.run.attempt(self.last.number)) if self.last is not None else None

    # People's requests are ordered by what they had seen, not by time: the clocks of two hosts may differ by more than
    # the time between a `cancel` on one and a `resume` on the other.

    @cached_property
    def resume_requests(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event["event"] == RESUME_REQUESTED)

    @cached_property
    def cancels(self) -> tuple[Event, ...]:
        """The events of all cancellations, including those that a person has revoked."""
        return tuple(event for event in self.events if event["event"] == CANCELLED)

    @cached_property
    def _resumes(self) -> tuple[Event, ...]:
        """The requests to resume that count: not those whose start was refused."""
        refused = [event.get("attempt") for event in self.events if event["event"] == RESUME_REFUSED]
        counted = []
        for request in reversed(self.resume_requests):  # an earlier one for the same attempt is as good
            if request.get("attempt") in refused:
                refused.remove(request.get("attempt"))
            else:
                counted.append(request)
        return tuple(reversed(counted))

    @cached_property
    def first_number(self) -> int:
        """Number of the first attempt since the last `resume`; earlier ones are forgiven.

        A `resume` whose start was refused, because the previous attempt was alive or Slurm took no job, does not count.
        """
        return 1 + max((event["attempt"] for event in self._resumes if event.get("attempt") is not None), default=-1)

    @cached_property
    def cancelled(self) -> Event | None:
        """The event of the owner's cancellation, unless the run was resumed since."""
        taken_back = max(map(self._cancels_taken_back, self._resumes), default=0)
        return self.cancels[-1] if len(self.cancels) > taken_back else None

    def _cancels_taken_back(self, request: Event) -> int:
        count = as_whole(request.get("cancels"))
        if count is None:  # written by a version that did not count them
            count = sum(cancel["time"] < request["time"] for cancel in self.cancels)
        return count

    @cached_property
    def lineage(self) -> Lineage:
        """Which work of each attempt counts."""
        return read_lineage(self.run)

    @cached_property
    def metrics(self) -> LatestMetrics:
        """The latest metrics."""
        return read_latest(self.run.metrics_file, self.lineage)

    def counts(self, event: Event) -> bool:
        """Whether an event is about a step that belongs to the run, or about no step."""
        attempt, step = event.get("attempt"), as_whole(event.get("step"))
        return attempt is None or step is None or self.lineage.counts(attempt, step)

    @cached_property
    def last_saved(self) -> int | None:
        """The last step that was saved and belongs to the run; None before the first, and after a fresh start."""
        saved = (event for event in self.events if event["event"] == CHECKPOINT and self.counts(event))
        return max((step for event in saved if (step := as_whole(event.get("step"))) is not None), default=None)

    def next_of_chain(self, own: str | None, job_ids: Sequence[str]) -> str | None:
        """Return the job that is queued behind a job for the same run; None if there is none.

        One that was started too early, while an attempt was alive, ended without doing anything.
        """
        started_early = {event.get("slurm_job_id") for event in self.events if event["event"] == START_REFUSED}
        behind = job_ids[job_ids.index(own) + 1 :] if own in job_ids else ()
        return next((job_id for job_id in behind if job_id not in started_early), None)

    def of_attempt(self, number: int, *names: str) -> list[Event]:
        """Return the events of one attempt by time; only those with the given names, if any are given."""
        return [event for event in self._by_attempt.get(number, ()) if not names or event["event"] in names]

    @cached_property
    def _by_attempt(self) -> dict[int, list[Event]]:
        found: dict[int, list[Event]] = {}
        for event in self.events:
            if event.get("attempt") is not None:
                found.setdefault(event["attempt"], []).append(event)
        return found

    @cached_property
    def reports_nothing(self) -> bool:
        """Whether it is a script that does not use this package, and so reports no steps or checkpoints."""
        if any(event["event"] in (STARTED, RESUMED) for event in self.events):
            return False
        return any(event["event"] == NODE_STARTED and event.get("script") for event in self.events)

    def ran_for(self, number: int) -> float:
        """Return the seconds from the start of an attempt's first node to the last event; 0 if none has started."""
        started = [float(event["time"]) for event in self.of_attempt(number, NODE_STARTED)]
        return float(self.of_attempt(number)[-1]["time"]) - min(started) if started else 0.0

    def ran_on(self) -> list[tuple[int, Event]]:
        """Find attempts that were still alive after a newer one had begun: the number, and each such node's last event.

        Covers the attempts since the last `resume`, and the last one before it.
        """
        numbers = (record.number for record in self.attempts if record.number >= self.first_number - 1)
        return [
            (number, event)
            for number in numbers
            for event in self.of_attempt(number, NODE_FINISHED)
            if event.get("outcome") == node_outcome.SUPERSEDED
        ]

    def current(self, name: str) -> Event | None:
        """Return the last event with that name of the latest attempt, unless the run was resumed since.

        What an earlier attempt reports once a newer one has begun does not count: a node that is cut off from Slurm's
        controller keeps training while its job has been started elsewhere.
        """
        since = max(self.first_number, self.last_number or 0)
        found = (event for event in reversed(self.events) if event["event"] == name)
        counted = (since,) if self.first_number else (since, None)
        return next((event for event in found if event.get("attempt") in counted), None)

    def attempts_without_progress(self, upto: int) -> int:
        """Count back from `upto` how many attempts ended without a checkpoint of a new step.

        Attempts before the last `resume` do not count; nor does a checkpoint of step 0. A script that reports nothing
        counts as having made progress in an attempt that it was asked to end.
        """
        idle = 0
        saved: set[int] = set()
        best = 0
        for number in sorted({record.number for record in self.attempts if record.number <= upto} | {upto}):
            for event in self.of_attempt(number, CHECKPOINT, CHECKPOINT_DAMAGED):
                step = as_whole(event.get("step"))
                if step is None or not self.counts(event):
                    continue
                if event["event"] == CHECKPOINT:
                    saved.add(step)
                else:
                    saved.discard(step)
                    best = min(best, max(saved, default=0))
            newest = max(saved, default=0)
            if number >= self.first_number:
                stopped = self.reports_nothing and self.of_attempt(number, STOPPED)
                idle = 0 if newest > best or stopped else idle + 1
            best = newest
        return idle


def read_history(run: RunDirectory, known: Iterable[AttemptRecord] = (), *, strict: bool = False) -> History:
    """Read a run's events and attempts as they are now.

    Parameters
    ----------
    known
        Records that were read a moment ago. Those of attempts that are over do not change and are not read again.
    strict
        See `cluster_ddp.run.events.read_events`.
    """
    over = {record.number: record for record in known if record.ended is not None}
    listed = list_attempts(run, strict=strict)
    attempts = tuple(over.get(attempt.number) or read_attempt(attempt, strict=strict) for attempt in listed)
    return History(run, tuple(read_events(run, strict=strict)), attempts)
