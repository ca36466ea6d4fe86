"""Detects gradients carried over from before the previous update, which no checkpoint contains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cluster_ddp.train.objects.comparing import is_nonzero
from cluster_ddp.train.optimizer import parameters_of


class CarriedGradients:
    """Warns, once, about an optimizer whose update contains gradients from before the previous update.

    Either nothing sets them to zero, or one optimizer steps less often than another. Each optimizer is watched from the
    end of the first step with an update until its next update.

    Parameters
    ----------
    optimizers
        The optimizers passed in.
    warn
        Called with the message.
    """

    def __init__(self, optimizers: Iterable[Optimizer], warn: Callable[[str], None]) -> None:
        self._optimizers, self._warn = list(optimizers), warn
        self._has_warned = False

    def end_step(self, *, updated: bool) -> None:
        """Call after each step."""
        if updated:
            optimizers, self._optimizers = self._optimizers, []
            for optimizer in optimizers:
                self._look_at(optimizer)

    def _look_at(self, optimizer: Optimizer) -> None:
        carried: dict[int, bool] = {}
        weights: list[Any] = [weight for weight in parameters_of(optimizer) if weight.requires_grad]
        # These hooks run before a gradient is accumulated.
        handles = [weight.register_hook(_noting(weight, carried)) for weight in weights]

        def updated(*_: Any) -> None:
            for handle in (*handles, after):
                handle.remove()
            if any(carried.values()) and not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"an update of {type(optimizer).__name__} has gradients in it from before the last update, which "
                    "no checkpoint contains: a resume is not exact. Call optimizer.zero_grad() in each step; to "
                    "accumulate, step all optimizers after the same batches, and give resumable() accumulate="
                )

        after: RemovableHandle = optimizer.register_step_post_hook(updated)


def _noting(weight: Tensor, carried: dict[int, bool]) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        if carried.get(id(weight), True):  # once it was zero, anything in it is from this step
            carried[id(weight)] = weight.grad is not None and is_nonzero(weight.grad)

    return note
