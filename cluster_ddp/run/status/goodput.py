"""How much of a run's time went into work that was kept."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster_ddp.run.attempt_record import AttemptRecord
from cluster_ddp.run.events import CHECKPOINT, COMPLETED, RESUMED, STARTED, STOPPED
from cluster_ddp.run.history import History


@dataclass(frozen=True)
class Goodput:
    """Seconds over all attempts.

    Only a script itself knows what it kept: if it reports nothing, productive and lost are None.
    """

    # Training whose result is in a checkpoint; in an attempt that is alive, all training so far
    productive_seconds: float | None
    # Start-up, work after the last checkpoint (which had to be repeated), and the time after training had ended
    lost_seconds: float | None
    running_seconds: float  # both
    waiting_seconds: float  # in the queue: no attempt was alive
    ratio: float | None  # productive / (productive + lost); None as long as both are 0


def goodput_of(history: History, *, created: float | None, alive: bool) -> Goodput:
    """Add up a run's time.

    Parameters
    ----------
    created
        When the run was made (Unix seconds), if known; waiting counts from then.
    """
    productive = lost = waiting = 0.0
    free_since = created
    for record in history.attempts:
        going_on = alive and record is history.last and record.ended is None  # else its next start has not begun yet
        end = max(time.time(), record.begun) if going_on else _end_of(history, record)
        useful = _productive(history, record, end, going_on=going_on)
        productive += useful
        lost += max(0.0, end - record.begun - useful)
        waiting += max(0.0, record.begun - free_since) if free_since is not None else 0.0
        free_since = end
    total = productive + lost
    ratio = round(productive / total, 4) if total > 0 else None
    running, waiting = round(total, 3), round(waiting, 3)
    if history.reports_nothing:
        return Goodput(None, None, running, waiting, None)
    return Goodput(round(productive, 3), round(lost, 3), running, waiting, ratio)


def _end_of(history: History, record: AttemptRecord) -> float:
    """Return when an attempt ended; if it was killed, its last sign of life."""
    if record.ended is not None:
        return max(record.ended, record.begun)
    signs = [float(event["time"]) for event in history.of_attempt(record.number)]
    signs.append(history.metrics.times.get(record.number, record.begun))
    return max(record.begun, *signs)


def _productive(history: History, record: AttemptRecord, end: float, *, going_on: bool) -> float:
    """Return the seconds from each (re)start of training in an attempt to the last checkpoint before the next one."""
    productive = 0.0
    training_since: float | None = None
    kept_until = 0.0
    for event in history.of_attempt(record.number, STARTED, RESUMED, CHECKPOINT, STOPPED, COMPLETED):
        if event["event"] in (STARTED, RESUMED):
            productive += max(0.0, kept_until - training_since) if training_since is not None else 0.0
            training_since, kept_until = float(event["time"]), 0.0
        elif history.counts(event):
            kept_until = float(event["time"])
    if training_since is None:
        return productive
    if going_on:
        kept_until = end
    return min(productive + max(0.0, kept_until - training_since), max(0.0, end - record.begun))
