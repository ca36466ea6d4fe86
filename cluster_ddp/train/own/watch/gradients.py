"""Sees gradients that a custom loop adds to those of a step before, and that no checkpoint contains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class CarriedGradients:
    """Warns, once, about an optimizer whose update has gradients in it that are older than the update before.

    Because nothing sets them to zero, or because one optimizer steps more rarely than another. It is looked at from the
    end of the first step with an update to the next update of each optimizer.

    Parameters
    ----------
    optimizers
        Those that are kept.
    warn
        Takes the message.
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
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        # They are called before a gradient is added.
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
        if carried.get(id(weight), True):  # once it was zero, what is in it is of this step
            carried[id(weight)] = weight.grad is not None and _has_values(weight.grad)

    return note


def _has_values(gradient: Tensor) -> bool:
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
