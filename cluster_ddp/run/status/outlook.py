"""How fast a run trains, and when it will finish."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster_ddp.run.history import History


@dataclass(frozen=True)
class Outlook:
    """How fast a run trains and when it will finish, from its latest measurements."""

    samples_per_second: float | None  # None if the run does not measure it
    ends: float | None  # Unix seconds at which the last step will finish if nothing interrupts it; None if not known

    @property
    def seconds_left(self) -> float | None:
        """Seconds from now to the end."""
        return None if self.ends is None else max(0.0, self.ends - time.time())


def outlook_of(history: History, total_steps: int | None) -> Outlook:
    """Return the outlook of a run that trains, from the last line of its metrics."""
    latest = history.metrics
    seconds, measured = latest.values.get("seconds_per_step"), latest.times.get(latest.attempt)
    rate = latest.values.get("samples_per_second")
    if latest.step is None or measured is None or latest.attempt != history.last_number:
        return Outlook(None, None)
    known = seconds is not None and total_steps is not None and seconds > 0
    ends = measured + seconds * max(0, total_steps - latest.step) if known else None  # type: ignore[operator]
    return Outlook(rate if rate is not None and rate > 0 else None, ends)
