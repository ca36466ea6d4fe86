"""Detects optimizers that were not passed in: refuses training with them, and reports one around those passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.optimizer import parameters_of
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import found_or_nothing, living, reachable, running_variables
from cluster_ddp.train.own.values import addresses, has_values, tensors_in

_DEPTH = 2  # a variable's value, and its attributes


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
        self._weights = set(map(id, parameters_of(*passed_in.optimizers)))
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
        if any(id(weight) in self._weights for weight in parameters_of(optimizer)):
            raise TrainError(
                f"an optimizer ({type(optimizer).__name__}) that was not passed in has trained weights that were: no "
                "checkpoint would contain its state. Create all optimizers once, before resumable() or steps(), and "
                "pass them in (optimizer=...); to change the learning rate, set it in the groups"
            )


def watch_other_optimizers(passed_in: PassedIn, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about an optimizer with state of its own around one that was passed in.

    An example is a Lookahead whose slow weights are not in the state of the optimizer inside it.
    """
    yield
    if names := {type(outer).__name__ for outer in found_or_nothing(_outer(passed_in))}:
        warn(
            f"an optimizer around one that was passed in ({', '.join(sorted(names))}) holds tensors of its own "
            "like the weights, which no checkpoint contains and which start over, so a resume is not exact: "
            "pass in the outer one, or, if that is refused, use another implementation of it"
        )


def _outer(passed_in: PassedIn) -> Iterator[Any]:
    inside = {id(optimizer): optimizer for optimizer in passed_in.stepping}
    given = {id(thing) for thing in passed_in.others.values()}
    weights = parameters_of(*passed_in.stepping)
    shapes = {weight.shape for weight in weights if weight.numel() > 1}
    saved = addresses(passed_in.tensors())
    saved |= {weight.grad.data_ptr() for weight in weights if weight.grad is not None}
    for optimizer in inside.values():
        saved |= addresses(tensors_in(vars(optimizer)))
    around = {id(held): held for _, held in reachable(running_variables(), _DEPTH) if hasattr(held, "param_groups")}
    around |= {id(held): held for held in living(Optimizer)}
    for outer in around.values():
        parts = getattr(outer, "__dict__", {})
        if id(outer) in inside.keys() | given or not any(id(part) in inside for part in parts.values()):
            continue
        own = (tensor for tensor in tensors_in(parts) if has_values(tensor) and tensor.data_ptr() not in saved)
        if any(tensor.shape in shapes for tensor in own):
            yield outer
