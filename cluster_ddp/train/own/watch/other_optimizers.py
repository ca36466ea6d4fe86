"""Refuses training with an optimizer that was not passed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.passed_in import PassedIn


class OtherOptimizers:
    """Refuses an optimizer that was not passed in and trains weights that were, in more than one step.

    A loop that makes its optimizer in each epoch would train but never be saved, because its updates would not be seen.
    An optimizer made for a single step, as for the inner steps of MAML and Reptile, has no state that a resume needs.

    Parameters
    ----------
    passed_in
        What was passed in.
    batches
        Returns the number of batches so far, or None outside of a step: code after the loop may train freely.
    """

    def __init__(self, passed_in: PassedIn, batches: Callable[[], int | None]) -> None:
        self._known = {id(optimizer) for optimizer in passed_in.stepping}
        self._weights = {id(weight) for optimizer in passed_in.optimizers for weight in _weights_of(optimizer)}
        self._batches = batches
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._handle = register_optimizer_step_post_hook(self._see)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _see(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in self._known:
            return
        batch = self._batches()
        if batch is None or self._seen.setdefault(optimizer, batch) == batch:
            return
        if any(id(weight) in self._weights for weight in _weights_of(optimizer)):
            raise TrainError(
                f"a {type(optimizer).__name__} that was not passed in has trained weights that are: its state would "
                "be in no checkpoint. Make all optimizers once, before resumable() or steps(), and hand them over "
                "(optimizer=...); to change the learning rate, set it in the groups"
            )


def _weights_of(optimizer: Optimizer) -> list[Any]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
