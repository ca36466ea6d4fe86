"""From the losses of micro-batches to the gradient of one step's loss over its global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.metrics import StepLoss
from cluster_ddp.train.sampler import Share


class Objective:
    """Runs the backward passes so that the gradients are those of the whole global batch.

    The loss of a step is the mean over its global batch: each micro-batch counts by its samples. Where a task gives
    (sum, weight), it is the sum over the global batch divided by its weight.

    Parameters
    ----------
    parameters
        The trainable parameters.
    scaler
        The gradient scaler of fp16, or None.

    Attributes
    ----------
    last
        The loss of the last micro-batch, as a number where it is on the host.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler | None,
        *,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.last: Tensor | float = 0.0
        self._parameters = parameters
        self._scaler = scaler
        self._world_size = world_size
        self._on_cpu = device.type == "cpu"
        self._weight: Tensor | None = None
        self._weighing: dist.Work | None = None

    def backward(self, loss: Any, share: Share, log: StepLoss | None) -> None:
        """Add the gradients of one micro-batch.

        Parameters
        ----------
        loss
            What the task's `loss` gave.
        share
            The micro-batch.
        log
            Takes the loss when the step is one that is logged.

        Raises
        ------
        TaskError
            The loss is no scalar, or does not depend on a parameter.
        """
        if type(loss) is tuple:
            total, factor = self._weighed(loss, share, log)
            self._spread(total, factor)
            return
        # DDP averages over the ranks; times the number of ranks it is the sum.
        self._spread(scalar_loss(loss), share.samples * self._world_size / share.of)
        if log is not None:
            part = share.samples / share.of
            log.add(self.last * part, part)

    def finish(self) -> None:
        """Call when a step's micro-batches are done: divides by the weight of the global batch where there is one."""
        if self._weight is None:
            return
        if self._weighing is not None:
            self._weighing.wait()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self._weight)
        self._weight = self._weighing = None

    def _weighed(self, loss: tuple[Any, ...], share: Share, log: StepLoss | None) -> tuple[Tensor, float]:
        if len(loss) != 2:
            raise TaskError(f"loss() gave a tuple of {len(loss)}; give a scalar, or the pair (sum, weight)")
        total, counts = scalar_loss(loss[0]), bool(share.samples)
        exact = torch.float32 if total.device.type == "mps" else torch.float64
        if not isinstance(loss[1], (Tensor, Real)):
            raise TaskError(f"loss() gave a {type(loss[1]).__name__} as the weight of a batch; give a number")
        if isinstance(loss[1], Tensor):
            weight = loss[1].detach().to(total.device, exact, non_blocking=True) * counts
        else:  # filled in on the device; a copy from the host would wait for all that is queued there
            weight = torch.full((), float(loss[1]) * counts, dtype=exact, device=total.device)
        if log is not None:
            log.add(total.detach() * counts, weight)
        self._weight = weight if self._weight is None else self._weight + weight
        if share.last and self._world_size > 1:
            self._weighing = dist.all_reduce(self._weight, async_op=True)
        return total, float(self._world_size * counts)

    def _spread(self, total: Tensor, factor: float) -> None:
        """Go backward. A loss that is not finite makes all gradients NaN, so that every rank comes to know."""
        if self._on_cpu:
            self.last = value = total.item()
            if value - value != 0.0:
                factor = math.nan
            if factor != 1.0:
                total = total * factor
        else:
            self.last = detached = total.detach()
            total = total * (detached - detached + factor)
        if self._scaler is not None:
            total = self._scaler.scale(total)
        total.backward()  # type: ignore[no-untyped-call]


def scalar_loss(loss: Any) -> Tensor:
    """The loss, when it is one.

    Raises
    ------
    TaskError
        It is no scalar, or does not depend on a parameter.
    """
    if not isinstance(loss, Tensor) or loss.ndim:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TaskError(f"loss() gave {what}; give a scalar tensor (such as .mean() of it), or the pair (sum, weight)")
    if not loss.requires_grad:
        raise TaskError("loss() gave a tensor that no parameter leads to: compute it from model(...) without detach()")
    return loss
