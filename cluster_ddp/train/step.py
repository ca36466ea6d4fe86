"""One step: from the losses of its micro-batches to the gradients of its global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.metrics.losses import StepLoss


class Gradients:
    """Runs the backward passes of a step, so that its gradients are those of the whole global batch.

    The loss of a step is the mean over its global batch: each micro-batch counts by its samples. Where a task gives
    (sum, weight), it is the sum over the global batch divided by its weight.

    A loss that is not finite makes gradients NaN, so that every rank comes to know, also where the way back to the
    weights would hide it, as a clamp does.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler | None,
        *,
        world_size: int,
        device: torch.device,
        compressed: bool = False,  # a hook sends gradients in fewer bits, so they get the size of a mean before
    ) -> None:
        self.last: Tensor | float = 0.0  # the loss of the last micro-batch, a number where it is on the host
        self._parameters = parameters
        self._scaler = scaler
        self._world_size = world_size
        self._on_cpu = device.type == "cpu"
        self._compressed = compressed and world_size > 1
        self._weight: Tensor | None = None
        self._intact: Tensor | None = None  # on a device: NaN when a loss of this step is not finite
        self._sums: list[dist.Work] = []  # of the two above, over the ranks

    def backward(self, loss: Any, micro: MicroBatch, log: StepLoss | None) -> None:
        """Add the gradients of one micro-batch; a `TaskError` when the loss is no scalar or depends on no parameter."""
        if type(loss) is tuple:
            total = self._weighed(loss, micro, log)
            # DDP averages over the ranks; times the number of ranks it is the sum.
            factor: Tensor | float = float(self._world_size * bool(micro.samples))
            if self._compressed and micro.last:
                factor = factor * self._divide_before_sending()
        else:
            total = scalar_loss(loss)
            factor = micro.samples * self._world_size / micro.global_batch
        if self._on_cpu:
            self._backward_on_cpu(total, factor)
        else:
            self._backward_on_device(total, factor, last=micro.last)
        if log is not None and type(loss) is not tuple:
            part = micro.samples / micro.global_batch
            log.add(self.last * part, part)

    def finish(self) -> None:
        """Call when a step's micro-batches are done: divides by the weight of the global batch where there is one."""
        for work in self._sums:
            work.wait()
        self._sums.clear()
        if self._weight is not None:
            _multiply(gradients_of(self._parameters), 1.0 / self._weight)
        elif self._intact is not None:
            for gradient in gradients_of(self._parameters)[:1]:
                gradient.mul_(_one_or_nan(self._intact))
        self._weight = self._intact = None

    def _weighed(self, loss: tuple[Any, ...], micro: MicroBatch, log: StepLoss | None) -> Tensor:
        """The sum of a pair (sum, weight); the weight is added up over the micro-batches, then over the ranks."""
        if len(loss) != 2:
            raise TaskError(f"loss() gave a tuple of {len(loss)}; give a scalar, or the pair (sum, weight)")
        total, counts = scalar_loss(loss[0]), bool(micro.samples)
        exact = torch.float32 if total.device.type == "mps" else torch.float64
        if not isinstance(loss[1], (Tensor, Real)):
            raise TaskError(f"loss() gave a {type(loss[1]).__name__} as the weight of a batch; give a number")
        if isinstance(loss[1], Tensor):
            weight = loss[1].detach().to(total.device, exact, non_blocking=True) * counts
        else:  # filled in on the device; a copy from the host would wait for all that is queued there
            weight = torch.full((), float(loss[1]) * counts, dtype=exact, device=total.device)
        if log is not None:
            log.add(total.detach() * counts, weight)
        if not self._on_cpu:
            weight = weight * _one_or_nan(total)
        self._weight = weight if self._weight is None else self._weight + weight
        if micro.last and self._world_size > 1:
            self._sum_over_ranks(self._weight)
        return total

    def _divide_before_sending(self) -> Tensor:
        """Wait for the weight of the global batch, divide what has been added up so far, and give the factor for more.

        A hook that sends fp16 would make infinities of sums that are fine when they are divided.
        """
        assert self._weight is not None
        for work in self._sums:
            work.wait()
        self._sums.clear()
        factor = 1.0 / self._weight
        _multiply(gradients_of(self._parameters), factor)
        self._weight = None
        return factor

    def _backward_on_cpu(self, total: Tensor, factor: Tensor | float) -> None:
        self.last = value = total.item()
        handles = []
        if value - value != 0.0:  # an infinity or a NaN
            handles = [
                parameter.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
                for parameter in self._parameters
                if parameter.requires_grad
            ]
        self._go_backward(total, factor)
        for handle in handles:
            handle.remove()

    def _backward_on_device(self, total: Tensor, factor: Tensor | float, *, last: bool) -> None:
        """The host does not know the loss; what comes of it is multiplied into a gradient when all have been summed."""
        self.last = total.detach()
        if self._weight is None:  # else it is in the weight
            intact = _one_or_nan(total)
            self._intact = intact if self._intact is None else self._intact * intact
            if last and self._world_size > 1:
                self._sum_over_ranks(self._intact)
        self._go_backward(total, factor)

    def _go_backward(self, total: Tensor, factor: Tensor | float) -> None:
        if isinstance(factor, Tensor) or factor != 1.0:
            total = total * factor
        if self._scaler is not None:
            total = self._scaler.scale(total)
        run_backward(total)

    def _sum_over_ranks(self, value: Tensor) -> None:
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        self._sums.append(work)


def run_backward(loss: Tensor) -> None:
    """Run the backward pass of a loss; a `TaskError` when a part of it has been run before."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TaskError(
            "loss() gave a loss of which a part has had its backward pass: let loss() give the loss without calling "
            "backward(), which the trainer does, and detach() what it keeps from one step to the next, such as the "
            "hidden state of a recurrent net"
        ) from error


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of those that have one."""
    # Bound, because each look at `grad` costs more than the rest.
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def _multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all by a number; one of another type than theirs would take a GPU a kernel for each."""
    if gradients and gradients[0].dtype is torch.float32:
        factor = factor.float()  # as each of them would round it
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _one_or_nan(value: Tensor) -> Tensor:
    detached = value.detach()
    return detached - detached + 1.0


def scalar_loss(loss: Any) -> Tensor:
    """The loss, when it is one; a `TaskError` when it is no scalar, or does not depend on a parameter."""
    if not isinstance(loss, Tensor) or loss.ndim:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TaskError(f"loss() gave {what}; give a scalar tensor (such as .mean() of it), or the pair (sum, weight)")
    if not loss.requires_grad:
        raise TaskError("loss() gave a tensor that no parameter leads to: compute it from model(...) without detach()")
    return loss
