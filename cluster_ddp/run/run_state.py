"""The states of a run, as shown to people."""

from __future__ import annotations

import enum


class RunState(str, enum.Enum):
    """Where a run stands, as `status` shows it."""

    PENDING = "PENDING"
    HELD = "HELD"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    REQUEUED = "REQUEUED"
    STOPPED = "STOPPED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STALLED = "STALLED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    @property
    def alive(self) -> bool:
        """Whether the run has processes."""
        return self in (RunState.RUNNING, RunState.SUSPENDED)

    @property
    def open(self) -> bool:
        """Whether anything more will happen to the run by itself."""
        return self.alive or self in (RunState.PENDING, RunState.REQUEUED)
