"""The latest values in `metrics.jsonl`, which rank 0 may be writing at this moment."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cluster_ddp.run.lineage import Lineage
from cluster_ddp.run.reading import as_number, as_time, as_whole, read_json_lines

# A long run's file is too long to read at each look; this much of its end holds tens of thousands of lines.
_TAIL_BYTES = 4 << 20
_POSITION = frozenset({"step", "samples", "epoch", "attempt", "time"})


@dataclass
class LatestMetrics:
    """Where training is and what it measured last."""

    # step, samples: of the latest line that counts; None before the first
    step: int | None = None
    samples: int | None = None
    attempt: int = -1
    values: dict[str, float] = field(default_factory=dict)  # latest value of each metric; NaN when it was not finite
    # steps, times: of each attempt that the end of the file tells of: the highest step and the latest time (Unix
    # seconds)
    steps: dict[int, int] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


def read_latest(path: Path, lineage: Lineage) -> LatestMetrics:
    """Read the end of a metrics file.

    What an attempt has logged beyond the place that a later one goes on from does not count.
    """
    rows = [row for row in read_json_lines(path, _TAIL_BYTES) if as_whole(row.get("step")) is not None]
    rows.sort(key=lambda row: (as_whole(row.get("attempt")) or 0, row["step"]))
    latest = LatestMetrics()
    for row in rows:
        attempt = as_whole(row.get("attempt")) or 0
        latest.steps[attempt] = row["step"]
        if (moment := as_time(row.get("time"))) is not None:
            latest.times[attempt] = max(moment, latest.times.get(attempt, 0.0))
        if not lineage.counts(attempt, row["step"]):
            continue
        latest.step, latest.attempt, latest.samples = row["step"], attempt, as_whole(row.get("samples"))
        for key, value in row.items():
            if key in _POSITION:
                continue
            if type(value) is float and -sys.float_info.max <= value <= sys.float_info.max:  # nearly all of them
                latest.values[key] = value
            elif value is None:
                latest.values[key] = math.nan  # it was not finite
            elif (number := as_number(value)) is not None:
                latest.values[key] = number
    return latest
