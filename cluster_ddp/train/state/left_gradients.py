"""Finds gradients that one step leaves and the next one uses, which no checkpoint contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cluster_ddp.train.objects.comparing import is_nonzero
from cluster_ddp.train.optimizer import parameters_of

Gradients = Mapping[str, tuple[Tensor, str]]
"""By name, each weight that has a gradient, and what holds it."""


def gradients_in(holder: str) -> str:
    """What to call the gradients of what holds the weights."""
    return f"the gradients in {holder}"


class LeftGradients:
    """Notes what happens to gradients that a step has left.

    Attributes
    ----------
    cleared
        The names of those that were zero before the next ones were added to them.
    """

    def __init__(self) -> None:
        self.cleared: set[str] = set()
        self._used: set[str] = set()  # as `gradients_in` calls them
        self._handles: list[RemovableHandle] = []

    def watch(self, left: Gradients) -> None:
        """Note, until `stop`, which of these optimizers use, and which are zero before the next ones are added."""
        # With the gradients, so that no other is at the address of one of them.
        by_id = {id(weight.grad): (weight.grad, name, holder) for name, (weight, holder) in left.items()}

        def note(optimizer: Optimizer, *_: Any) -> None:
            held = [parameter.grad for parameter in parameters_of(optimizer)]
            found = [by_id[id(gradient)] for gradient in held if id(gradient) in by_id]
            self._used |= {gradients_in(holder) for _, name, holder in found if name not in self.cleared}

        if left:
            self.watch_clearing(left)
            self._handles.append(register_optimizer_step_pre_hook(note))

    def watch_clearing(self, left: Gradients) -> None:
        """Note, until `stop`, which of these are zero when the next ones are added to them."""
        for name, (weight, _) in left.items():
            if weight.requires_grad:
                handles: list[RemovableHandle] = []

                def note(_: Tensor, name: str = name, weight: Tensor = weight, handles: Any = handles) -> None:
                    handles.pop().remove()
                    if weight.grad is not None and not is_nonzero(weight.grad):
                        self.cleared.add(name)

                handles.append(weight.register_hook(note))  # type: ignore[no-untyped-call]
                self._handles += handles

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take_used(self) -> set[str]:
        """What optimizers have used since the last call."""
        used, self._used = self._used, set()
        return used
