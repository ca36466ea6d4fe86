"""Checks whether a checkpoint can be written in the time between a signal and the end of the job."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.slurm.control import DEFAULT_KILL_WAIT, kill_wait

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec
    from cluster_ddp.slurm.partitions import Partition

SMALL = 256 << 20  # bytes that any storage can write in time
_SAMPLE = 32 << 20  # bytes written to measure the rate
_GIB = float(1 << 30)


def what_does_not_fit(
    spec: JobSpec, runs_dir: Path, size: int, partition: Partition | None, *, seconds: float
) -> Iterator[str]:
    """Say which warnings are too short to save `size` bytes; `seconds` limits how long Slurm is queried."""
    rate = _write_rate(runs_dir) if size > SMALL else None
    if rate is None:
        return
    needed = size / rate
    what = f"a checkpoint of {size / _GIB:.1f} GiB takes about {needed:.0f} s at the {rate / 2**20:.0f} MiB/s at which"
    what += f" this machine can write to {runs_dir}"
    if spec.slurm.time is not None and needed > spec.requeue.warning:
        yield f"{what}; requeue.warning is {spec.requeue.warning} s before the time limit: make it longer"
    if partition is None or not partition.preempted:
        return
    asked = kill_wait(seconds=seconds)
    left = partition.grace + (DEFAULT_KILL_WAIT if asked is None else asked)
    if needed > left:
        yield (
            f"{what}; a preempted job of partition {partition.name} has {left:.0f} s (GraceTime and KillWait): save "
            "often (checkpoint.every_minutes), since the last save may not be finished"
        )


def _write_rate(folder: Path) -> float | None:
    """Measure the bytes per second that can be written to a folder, which need not exist yet; None if none can."""
    while not folder.exists():
        folder = folder.parent
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        file.write(os.urandom(1 << 20) * (_SAMPLE >> 20))
        file.flush()
        os.fsync(file.fileno())
        return _SAMPLE / (time.perf_counter() - begin)
    return None
