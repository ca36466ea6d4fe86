"""The latest values in `metrics.jsonl`, which rank 0 may be writing at this moment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from cluster_ddp.run.reading import as_number, as_time, as_whole, read_json_lines

# A long run's file is too long to read at each look; this much of its end holds tens of thousands of lines.
_TAIL_BYTES = 4 << 20
_POSITION = frozenset({"step", "samples", "epoch", "attempt", "time"})


@dataclass
class LatestMetrics:
    """Where training is and what it measured last."""

    # step, samples: of the latest line; None before the first
    step: int | None = None
    samples: int | None = None
    attempt: int = -1
    values: dict[str, float] = field(default_factory=dict)  # latest value of each metric; NaN when it was not finite
    # steps, times: of each attempt that the end of the file tells of: the highest step and the latest time (Unix
    # seconds)
    steps: dict[int, int] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


def read_latest(path: Path) -> LatestMetrics:
    """Read the end of a metrics file; steps that were done again after a crash count as the later attempt says."""
    rows = [row for row in read_json_lines(path, _TAIL_BYTES) if as_whole(row.get("step")) is not None]
    rows.sort(key=lambda row: (as_whole(row.get("attempt")) or 0, row["step"]))
    latest = LatestMetrics()
    for row in rows:
        latest.step, latest.attempt = row["step"], as_whole(row.get("attempt")) or 0
        latest.samples = as_whole(row.get("samples"))
        latest.steps[latest.attempt] = row["step"]
        if (moment := as_time(row.get("time"))) is not None:
            latest.times[latest.attempt] = max(moment, latest.times.get(latest.attempt, 0.0))
        for key, value in row.items():
            if key in _POSITION:
                continue
            if value is None:
                latest.values[key] = math.nan  # it was not finite
            elif (number := as_number(value)) is not None:
                latest.values[key] = number
    return latest
