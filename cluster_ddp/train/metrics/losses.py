"""The loss of a step over all ranks, and reading numbers from the device without making the host wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class HostCopy:
    """The values of a small tensor, copied to the host in the background; read them a step later."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach()
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.take(tensor)

    def take(self, tensor: Tensor) -> None:
        """Copy another tensor of this shape and dtype, once the values of the one before have been read."""
        if self._arrived is None:
            self._values = tensor.detach()
        else:
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._arrived.record()

    def read(self) -> list[float]:
        """The values of a one-dimensional tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values


class StepLoss:
    """This rank's part of the loss of one step: exact, and no mean over steps, so that it depends only on the step."""

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64. On the host, Python floats take a tenth of the time of tensors.
        exact = torch.float32 if device.type == "mps" else torch.float64
        self._device_sums = None if device.type == "cpu" else torch.zeros(2, dtype=exact, device=device)
        self._total = self._weight = 0.0

    def add(self, total: Tensor | float, weight: Tensor | float) -> None:
        """Add a micro-batch: the sum of its losses (or its mean times its share), and the corresponding weight."""
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
    """The losses of several steps over their global batches, collected from the ranks while training continues.

    A loss has the same bits whichever steps it is collected with: the ranks' parts are added in the order of the ranks,
    whereas the order within an all-reduce would depend on the number of steps.
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
            self._work.wait()  # makes the stream wait, not the host
            self._work = None
        if self._work is None:
            self._copy = self._add_up()

    @property
    def arrived(self) -> bool:
        """Whether `read` would not have to wait for another rank."""
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
