"""How a training ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes
    ----------
    completed
        Whether all steps are done; otherwise it was stopped and can be resumed.
    step
        Steps that are finished, and saved.
    reason
        Why it was stopped, one of `run.stopfile.REASONS`, or None.
    at_once
        Whether the stop asked for no waiting.
    metrics
        The last value of each metric.
    """

    completed: bool
    step: int
    reason: str | None = None
    at_once: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
