"""Recognizes a run whose nodes have ended but whose keeper has not: it is deciding, or waiting to requeue the job."""

from __future__ import annotations

import time

from cluster_ddp.run.events import (
    COMPLETED,
    NODE_FINISHED,
    REQUEUE_DELAYED,
    REQUEUE_FAILED,
    REQUEUED,
    STALLED,
)
from cluster_ddp.run.history import History
from cluster_ddp.run.stopfile import FINAL_REASONS

_DECIDED_SECONDS = 300.0  # a keeper asks Slurm several questions, each of which may take a minute


def waits_for_requeue(history: History) -> str | None:
    """Say why the last attempt, which is over, still waits to be requeued; None if it does not."""
    why = why_delayed(history)
    return why and f"trying to requeue the job until the allocation is nearly over: {why}"


def why_delayed(history: History) -> str | None:
    """Return why the last attempt could not be requeued immediately, if it is still waiting; else None."""
    if history.last is None:
        return None
    said = history.of_attempt(history.last.number, REQUEUE_DELAYED, REQUEUED, REQUEUE_FAILED)
    if not said or said[-1]["event"] != REQUEUE_DELAYED:
        return None
    request = history.stop_request
    if request is not None and request.reason in FINAL_REASONS:  # somebody has ended the waiting
        return None
    return str(said[-1].get("reason"))


def is_deciding_or_waiting(history: History) -> bool:
    """Whether a keeper may still requeue the last attempt, whose nodes have ended."""
    return why_delayed(history) is not None or is_deciding(history)


def is_deciding(history: History) -> bool:
    """Whether the last attempt's nodes signed off a moment ago, so that its keeper may not have decided yet."""
    last = history.last
    if last is None or last.ended is not None:
        return False
    said = history.of_attempt(last.number, NODE_FINISHED, REQUEUED, REQUEUE_FAILED, STALLED, COMPLETED)
    if not said or said[-1]["event"] != NODE_FINISHED:
        return False
    return time.time() - float(said[-1]["time"]) < _DECIDED_SECONDS
