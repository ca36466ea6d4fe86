"""Reads `metrics.jsonl`, which rank 0 may be writing at the same time."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from operator import ge
from pathlib import Path
from typing import Any

from cluster_ddp.run.lineage import Lineage
from cluster_ddp.run.reading import MAX_LINES, as_number, as_time, as_whole, parse_lines, parse_object, read_tail

# The file of a long run is too long to be read every time; this much of its end contains tens of thousands of lines.
_TAIL_BYTES = 4 << 20
# A row as `MetricsFile` writes it.
_ROW = re.compile(
    rb'^(\{"step": (\d{1,18}), "samples": \d+, "epoch": \d+, "attempt": (\d{1,6}), [^\n]*\})$', re.MULTILINE
)
_POSITION = frozenset({"step", "samples", "epoch", "attempt", "time"})

Row = dict[str, Any]


@dataclass
class LatestMetrics:
    """Where training is, and what it measured last."""

    # step, samples: of the latest line that counts; None before the first
    step: int | None = None
    samples: int | None = None
    attempt: int = -1
    values: dict[str, float] = field(default_factory=dict)  # latest value of each metric; NaN if it was not finite
    # steps, times: highest step and latest time (Unix seconds) of each attempt in the end of the file
    steps: dict[int, int] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)


def read_latest(path: Path, lineage: Lineage) -> LatestMetrics:
    """Read the end of a metrics file.

    What an attempt has logged beyond the step that a later one continues from does not count.
    """
    try:
        data = read_tail(path, _TAIL_BYTES)
    except OSError:
        return LatestMetrics()
    rows = [row for row in _decisive(data, lineage) or parse_lines(data) if as_whole(row.get("step")) is not None]
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
            if type(value) is float and -sys.float_info.max <= value <= sys.float_info.max:  # the usual case
                latest.values[key] = value
            elif value is None:
                latest.values[key] = math.nan  # it was not finite
            elif (number := as_number(value)) is not None:
                latest.values[key] = number
    return latest


def values_by_step(path: Path) -> dict[int, dict[str, float | None]]:
    """Return the values in a metrics file by step, those of the latest attempt; None for what was not finite."""
    rows = sorted(parse_lines(read_tail(path, MAX_LINES)), key=lambda row: as_whole(row.get("attempt")) or 0)
    steps = ((as_whole(row.get("step")), row) for row in rows)
    return {step: {key: row[key] for key in row.keys() - _POSITION} for step, row in steps if step is not None}


def _decisive(data: bytes, lineage: Lineage) -> list[Row]:
    """Return the rows that decide what is latest, found from the end while parsing as few as possible.

    Empty if that is not certain. The last rows decide only if each row has a later (attempt, step) than the one before;
    they suffice once every metric named in the file has a value.
    """
    found = _ROW.findall(data)
    places = [(int(attempt), int(step)) for _, step, attempt in found]
    if len(found) != data.count(b"\n") or any(map(ge, places, places[1:])) or b"\\" in data:
        return []
    wanted = {name for line, _, _ in found for name in line.split(b'"')[1::2]}
    rows: list[Row] = []
    newer, counted = None, False
    for (line, _, _), (attempt, step) in zip(reversed(found), reversed(places), strict=True):
        if counted and not wanted and attempt == newer:
            continue
        newer, row = attempt, parse_object(line)
        if row is None:
            return []
        rows.append(row)
        if lineage.counts(attempt, step):
            counted = True
            wanted -= {key.encode() for key, value in row.items() if value is None or as_number(value) is not None}
    return rows[::-1]
