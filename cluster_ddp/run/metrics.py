"""The latest values in `metrics.jsonl`, which rank 0 may be writing at this moment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.run.lines import is_number, parse_object

# A long run's file is too long to read at each look; this much of its end holds tens of thousands of lines.
_TAIL_BYTES = 4 << 20
_POSITION = frozenset({"step", "samples", "epoch", "attempt", "time"})


@dataclass
class LatestMetrics:
    """Where training is and what it measured last.

    Attributes
    ----------
    step, samples
        Of the latest line; None before the first.
    values
        Latest value of each metric.
    steps, times
        Of each attempt that the end of the file tells of: the highest step and the latest time (Unix seconds).
    """

    step: int | None = None
    samples: int | None = None
    attempt: int = -1
    values: dict[str, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


def read_latest(path: Path) -> LatestMetrics:
    """Read the end of a metrics file; steps that were done again after a crash count as the later attempt says."""
    lines = _tail(path)
    rows = [row for line in lines if (row := parse_object(line)) is not None and _whole(row.get("step")) is not None]
    rows.sort(key=lambda row: (_whole(row.get("attempt")) or 0, row["step"]))
    latest = LatestMetrics()
    for row in rows:
        latest.step, latest.attempt = row["step"], _whole(row.get("attempt")) or 0
        latest.samples = _whole(row.get("samples"))
        latest.steps[latest.attempt] = row["step"]
        if is_number(row.get("time")):
            latest.times[latest.attempt] = max(float(row["time"]), latest.times.get(latest.attempt, 0.0))
        latest.values.update({key: value for key, value in row.items() if key not in _POSITION and is_number(value)})
    return latest


def _tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    return lines[1:] if start else lines


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and is_number(value) else None
