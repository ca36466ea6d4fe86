"""Saves that failed, or that a stop began and the end of the allocation cut short, and what to do about them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_ddp.run.events import CHECKPOINT, CHECKPOINT_FAILED, RESUMED, STARTED, STOP_REQUESTED, STOPPED
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.reading import as_number, as_whole
from cluster_ddp.run.stopfile import TIME_LIMIT

_SAVES_PER_ATTEMPT = 4  # if attempts are too short for a save at their end
SAVES_APART = 2.0
"""Time between saves, at least, as a multiple of their duration, so that training advances."""


@dataclass(frozen=True)
class UnfinishedSave:
    """A save at the end of an attempt that was begun and never finished."""

    step: int
    reason: str  # what asked the attempt to stop
    grace: float | None  # seconds that it had; None if not known
    trained: float  # seconds from the start of training in this attempt to the request

    def describe(self, takes: float | None) -> str:
        """Describe what happened and what to set, for people.

        Parameters
        ----------
        takes
            Seconds that a save of this run takes; None if not known.
        """
        within = "before the job ended" if self.grace is None else f"within {self.grace:.0f} s of grace"
        known = "" if takes is None else f"; a save takes about {takes:.1f} s here"
        more_time = "requeue.warning for more time, or " if self.reason == TIME_LIMIT else ""
        return (
            f"save of step {self.step} not finished {within}{known}. Set {more_time}checkpoint.every_steps or "
            "checkpoint.every_minutes so that less work is repeated; until then the run automatically saves more often"
        )


def failed_save(event: Mapping[str, Any]) -> str:
    """Say that a save failed, given the fields of its `checkpoint-failed`."""
    return f"the save of step {event.get('step')} failed ({why_it_failed(event)})"


def why_it_failed(event: Mapping[str, Any]) -> str:
    """Say why a save failed, and where, given the fields of its `checkpoint-failed`."""
    where = f" on {event['host']}" if "host" in event else ""
    return f"{event.get('file')}, rank {event.get('rank')}{where}: {event.get('error')}"


def unfinished_saves(history: History) -> list[UnfinishedSave]:
    """Return the unfinished saves since the last `resume`, in order, except of an attempt that may still save."""
    numbers = [record.number for record in history.attempts if record.number >= history.first_number]
    return [save for number in numbers if (save := _unfinished(history, number)) is not None]


def seconds_of_a_save(history: History) -> float | None:
    """Return how long the longest of the last few saves took; None before the first."""
    took = [as_number(event.get("seconds")) for event in history.events if event["event"] == CHECKPOINT]
    return max((seconds for seconds in took[-_SAVES_PER_ATTEMPT:] if seconds is not None), default=None)


def seconds_between_saves(history: History) -> float | None:
    """Return the maximum time between saves that keeps something of an attempt cut short; None if any will do."""
    trained = [save.trained for save in unfinished_saves(history)]
    if not trained:
        return None
    return max(min(trained) / _SAVES_PER_ATTEMPT, SAVES_APART * (seconds_of_a_save(history) or 0.0))


def _unfinished(history: History, number: int) -> UnfinishedSave | None:
    events = history.of_attempt(number, STARTED, RESUMED, STOP_REQUESTED, STOPPED, CHECKPOINT, CHECKPOINT_FAILED)
    asked = [event for event in events if event["event"] == STOP_REQUESTED]
    begun = [event for event in asked if event.get("node") is None and as_whole(event.get("step")) is not None]
    if not begun or _came_to_an_end(events, begun[-1]):
        return None
    graces = [grace for event in asked if (grace := as_number(event.get("grace"))) is not None]
    began, grace = float(begun[-1]["time"]), graces[-1] if graces else None
    may_still_save = history.last is not None and history.last.number == number and history.last.ended is None
    if may_still_save and (grace is None or time.time() < began + grace):
        return None
    starts = [float(event["time"]) for event in events if event["event"] in (STARTED, RESUMED)]
    trained = max(0.0, began - starts[-1]) if starts else 0.0
    return UnfinishedSave(int(begun[-1]["step"]), str(begun[-1].get("reason")), grace, trained)


def _came_to_an_end(events: Sequence[Event], begun: Event) -> bool:
    """Whether the save was made, or given up for a reason that is reported elsewhere."""
    return any(
        event["event"] in (STOPPED, CHECKPOINT_FAILED)
        or (event["event"] == CHECKPOINT and (as_whole(event.get("step")) or 0) >= begun["step"])
        for event in events
        if event["time"] >= begun["time"] or event["event"] == CHECKPOINT
    )
