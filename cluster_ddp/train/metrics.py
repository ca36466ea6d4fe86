"""metrics.jsonl, and the numbers of a log step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.delayed import HostCopy
from cluster_ddp.train.lines import LineFile


class MetricsFile:
    """Appends one JSON object per line, flushed at once. One process writes it. A full disk delays lines.

    Usable alone: ``MetricsFile(path, attempt=0).write(step=10, samples=320, epoch=0, values={"train/loss": 0.5})``.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._file = LineFile(path)

    def write(self, *, step: int, samples: int, epoch: int, values: Mapping[str, float]) -> None:
        """Append a line; a value that is not finite becomes null, which JSON can hold."""
        row: dict[str, float | None] = {
            "step": step,
            "samples": samples,
            "epoch": epoch,
            "attempt": self._attempt,
            "time": time.time(),
        }
        row.update((name, value if math.isfinite(value) else None) for name, value in values.items())
        self._file.write(json.dumps(row))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StepLoss:
    """The loss of one step over its global batch: exact, and no mean over steps, so that it depends on the step only.

    Each rank adds its micro-batches; the sum over ranks is started without waiting, and read a step later.

    Parameters
    ----------
    device
        Where the losses are.
    """

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64.
        self._sums = torch.zeros(2, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._copy: HostCopy | None = None

    def add(self, total: Tensor, weight: Tensor | float) -> None:
        """Add a micro-batch: the sum of its losses (or its mean times its share), and the weight that belongs to it."""
        self._sums[0] += total.detach()
        self._sums[1] += weight

    def start(self) -> None:
        """Begin to add up the ranks; every rank calls it after the same step."""
        if dist.is_initialized():
            self._work = dist.all_reduce(self._sums, async_op=True)
        else:
            self._copy = HostCopy(self._sums)

    def read(self) -> float:
        """The loss."""
        if self._copy is None:
            self._work.wait()
            self._copy = HostCopy(self._sums)
        total, weight = self._copy.read()
        return total / weight if weight else math.nan


class Speed:
    """Measures the time between log steps."""

    def __init__(self) -> None:
        self._time = time.perf_counter()
        self._samples = 0
        self._step = 0
        self._waited = 0.0

    def start(self, step: int, samples: int, waited: float) -> None:
        """Begin a measurement at this step."""
        self._time, self._step, self._samples, self._waited = time.perf_counter(), step, samples, waited

    def read(self, step: int, samples: int, waited: float) -> dict[str, float]:
        """The means since the last call.

        Returns
        -------
        samples_per_second over all ranks, seconds_per_step, and data_wait: the part of the time, 0 to 1, in which this
        rank waited for its batches.
        """
        seconds = max(time.perf_counter() - self._time, 1e-9)
        values = {
            "samples_per_second": (samples - self._samples) / seconds,
            "seconds_per_step": seconds / max(1, step - self._step),
            "data_wait": min(1.0, (waited - self._waited) / seconds),
        }
        self.start(step, samples, waited)
        return values


def communication_seconds(model: DistributedDataParallel) -> float:
    """Seconds of a step in which a rank only waits for gradients: communication that no computation hides.

    DDP measures it every 100 steps and keeps the mean; 0 before the first measurement.
    """
    measured: dict[str, int] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    nanoseconds = measured.get("avg_backward_comm_time", 0) - measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0.0, nanoseconds / 1e9)
