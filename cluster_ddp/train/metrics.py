"""metrics.jsonl, and the numbers of a log step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
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

    def write(
        self, *, step: int, samples: int, epoch: int, values: Mapping[str, float], measured: float | None = None
    ) -> None:
        """Append a line; a value that is not finite becomes null, which JSON can hold.

        `measured` is when the values were, in Unix seconds; by default now.
        """
        row: dict[str, float | None] = {
            "step": step,
            "samples": samples,
            "epoch": epoch,
            "attempt": self._attempt,
            "time": time.time() if measured is None else measured,
        }
        row.update((name, value if math.isfinite(value) else None) for name, value in values.items())
        self._file.write(json.dumps(row))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StepLoss:
    """This rank's part of the loss of one step: exact, and no mean over steps, so that it depends on the step only.

    Parameters
    ----------
    device
        Where the losses are.
    """

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64. On the host plain numbers cost a tenth of tensors.
        exact = torch.float32 if device.type == "mps" else torch.float64
        self._device_sums = None if device.type == "cpu" else torch.zeros(2, dtype=exact, device=device)
        self._total = self._weight = 0.0

    def add(self, total: Tensor | float, weight: Tensor | float) -> None:
        """Add a micro-batch: the sum of its losses (or its mean times its share), and the weight that belongs to it."""
        if self._device_sums is None:
            self._total += float(total)
            self._weight += float(weight)
        else:
            self._device_sums[0] += total
            self._device_sums[1] += weight

    def sums(self) -> Tensor:
        """Total and weight, shape (2,)."""
        if self._device_sums is None:
            return torch.tensor([self._total, self._weight], dtype=torch.float64)
        return self._device_sums


class TotalLosses:
    """The losses of several steps over their global batches; collected from the ranks while training goes on.

    A loss is the same to the last bit whichever steps it is collected with: the ranks' parts are added in the order of
    the ranks, where the order within an all-reduce would depend on how many there are.

    Parameters
    ----------
    losses
        Of the same steps on all ranks, which make this object after the same step.
    """

    def __init__(self, losses: Sequence[StepLoss]) -> None:
        own = torch.stack([loss.sums() for loss in losses])
        self._parts = [own]
        self._work: dist.Work | None = None
        self._copy: HostCopy | None = None
        if dist.is_initialized():
            self._parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            self._work = dist.all_gather(self._parts, own, async_op=True)
        if self._work is not None and own.is_cuda:
            self._work.wait()  # the stream waits, not the host
            self._work = None
        if self._work is None:
            self._copy = self._add_up()

    @property
    def arrived(self) -> bool:
        """Whether `read` need not wait for another rank."""
        return self._work is None or self._work.is_completed()

    def read(self) -> list[float]:
        """The loss of each step."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        copy = self._copy or self._add_up()
        values = copy.read()
        return [total / weight if weight else math.nan for total, weight in zip(values[::2], values[1::2], strict=True)]

    def _add_up(self) -> HostCopy:
        total = self._parts[0]
        for part in self._parts[1:]:
            total = total + part
        return HostCopy(total.flatten())


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
