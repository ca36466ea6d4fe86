"""Reading numbers from the device without making the host wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The values of a small tensor, on their way to the host; read them a step later, when they are there."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._values = tensor.detach()

    def read(self) -> list[float]:
        """The values of a one-dimensional tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values
