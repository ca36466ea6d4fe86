"""The backward passes of one step: from the losses of its micro-batches to the gradients of its global batch.

A loss that is not finite gives gradients that are not, so that `update` skips the step on all ranks.
"""

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
    """Runs the backward passes of a step, so that the gradients are those of the whole global batch.

    The loss of a step is the mean over its global batch: each micro-batch is weighted by its number of samples. If a
    task returns (sum, weight), it is the sum over the global batch divided by the weight of the global batch.

    A non-finite loss makes gradients NaN, so that every rank notices, even if the backward pass would hide it, as that
    of a clamp does.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler | None,
        *,
        world_size: int,
        device: torch.device,
        compressed: bool = False,  # a hook sends gradients in fewer bits, so they are divided before that
    ) -> None:
        self.last: Tensor | float = 0.0  # the loss of the last micro-batch; a float on the CPU
        self.is_computed = True  # whether that loss has a graph: a task may return a zero while it trains by itself
        self._parameters = parameters
        self._smallest_first = sorted(filter(Tensor.numel, parameters), key=Tensor.numel)
        self._scaler = scaler
        self._world_size = world_size
        self._on_cpu = device.type == "cpu"
        self._compressed = compressed and world_size > 1
        self._is_weighed: bool | None = None  # whether loss() returned (sum, weight) before
        self._weight: Tensor | None = None
        self._spoilt: Tensor | None = None  # on a GPU: 0, or NaN if a loss of this step is not finite
        self._sums: list[dist.Work] = []  # pending all-reduces of the two above

    def backward(self, loss: Any, micro: MicroBatch, log: StepLoss | None) -> None:
        """Add the gradients of one micro-batch.

        Raises
        ------
        TaskError
            The loss is not a scalar, requires no gradient, or on several ranks is sometimes a pair and sometimes not.
        """
        if self._world_size > 1 and self._is_weighed not in (None, type(loss) is tuple):
            raise TaskError(MIXED)  # the other ranks would wait for a weight, or send one that nobody expects
        self._is_weighed = type(loss) is tuple
        if self._is_weighed:
            total = self._weighed(loss, micro, log)
            # DDP averages over the ranks; multiplying by their number gives the sum.
            factor: Tensor | float = float(self._world_size * bool(micro.samples))
            if self._compressed and micro.last:
                factor = factor * self._divide_before_sending()
        else:
            total = scalar_loss(loss)
            factor = micro.samples * self._world_size / micro.global_batch
        self.is_computed = total.grad_fn is not None
        if self._on_cpu:
            self._backward_on_cpu(total, factor)
        else:
            self._backward_on_device(total, factor, last=micro.last)
        if log is not None and type(loss) is not tuple:
            part = micro.samples / micro.global_batch
            log.add(self.last * part, part)

    def finish(self) -> None:
        """Call after a step's last micro-batch; divides by the weight of the global batch, if there is one."""
        for work in self._sums:
            work.wait()
        self._sums.clear()
        if self._weight is not None:
            _multiply(gradients_of(self._parameters), 1.0 / self._weight)
        elif self._spoilt is not None:
            self._spoil(self._spoilt)
        self._weight = self._spoilt = None

    def _spoil(self, zero_or_nan: Tensor) -> None:
        """Make one gradient NaN if the number is, else leave its bits: the smallest, because it is read and written.

        A sparse one may have no elements.
        """
        gradients = gradients_of(self._smallest_first)
        if gradients:
            min(gradients, key=lambda gradient: gradient.is_sparse).mul_(zero_or_nan + 1.0)

    def _weighed(self, loss: tuple[Any, ...], micro: MicroBatch, log: StepLoss | None) -> Tensor:
        """Return the sum of a (sum, weight) pair; add the weight up over the micro-batches, then over the ranks."""
        if len(loss) != 2:
            raise TaskError(f"loss() returned a tuple of {len(loss)}; return a scalar, or the pair (sum, weight)")
        total, counts = scalar_loss(loss[0]), bool(micro.samples)
        exact = torch.float32 if total.device.type == "mps" else torch.float64
        if not isinstance(loss[1], (Tensor, Real)):
            raise TaskError(f"loss() returned type {type(loss[1]).__name__} as the weight of a batch; return a number")
        if isinstance(loss[1], Tensor):
            weight = loss[1].detach().to(total.device, exact, non_blocking=True) * counts
        else:  # filled in on the device; a copy from the host would wait for all work queued there
            weight = torch.full((), float(loss[1]) * counts, dtype=exact, device=total.device)
        if log is not None:
            log.add(total.detach() * counts, weight)
        if not self._on_cpu:
            weight = weight + _zero_or_nan(total)
        self._weight = weight if self._weight is None else self._weight + weight
        if micro.last and self._world_size > 1:
            self._sum_over_ranks(self._weight)
        return total

    def _divide_before_sending(self) -> Tensor:
        """Wait for the weight of the global batch, divide the gradients so far by it, and return its inverse.

        Undivided sums may overflow in a hook that sends fp16.
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
        """Run the backward pass without reading the loss on the host; `finish` makes a gradient NaN if needed."""
        self.last = total.detach()
        if self._weight is None:  # otherwise the weight carries it
            spoilt = _zero_or_nan(total)
            self._spoilt = spoilt if self._spoilt is None else self._spoilt + spoilt
            if last and self._world_size > 1:
                self._sum_over_ranks(self._spoilt)
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


MIXED = (
    "loss() returned a scalar in some steps and a pair (sum, weight) in others, but on several ranks all have to "
    "return the same in each step: return the pair (sum, 0) for a batch that has nothing to weigh"
)


def run_backward(loss: Tensor) -> None:
    """Run the backward pass of a loss; raise a `TaskError` if part of it was already run."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TaskError(
            "part of what loss() returned has already been through a backward pass: return the loss without calling "
            "backward(), which the trainer calls, and detach() what is kept from one step to the next, such as the "
            "hidden state of a recurrent network"
        ) from error


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    # Assigned once, because each access to `grad` costs more than the rest.
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def _multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a number; if its dtype differs from theirs, a GPU needs one kernel per gradient."""
    if gradients and gradients[0].dtype is torch.float32:
        factor = factor.float()  # each multiplication would round it the same way
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _zero_or_nan(value: Tensor) -> Tensor:
    detached = value.detach()
    return detached - detached


def scalar_loss(loss: Any) -> Tensor:
    """Return the loss; raise a `TaskError` if it is not a scalar tensor, or does not depend on a parameter."""
    if not isinstance(loss, Tensor) or loss.ndim:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise TaskError(
            f"loss() returned {what}; return a scalar tensor (such as its .mean()), or the pair (sum, weight)"
        )
    if not loss.requires_grad:
        raise TaskError(
            "loss() returned a tensor that depends on no parameter: compute it from model(...) without detach()"
        )
    return loss
