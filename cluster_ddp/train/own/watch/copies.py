"""Detects weight averages that a custom loop keeps in lists and dicts of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import found_or_nothing, reachable, running_variables
from cluster_ddp.train.own.values import has_values, sampled

_DEPTH = 3  # a variable's value, its attributes, and what these hold
_IN_OPTIMIZER = 4  # what an optimizer holds is checked with its state


class Copies:
    """Warns, after the second step, about lists and dicts with a tensor for each weight that steps change.

    An example is ``shadow[name] = decay * shadow[name] + (1 - decay) * weight``, in a variable of a running function or
    in an attribute of one.

    Parameters
    ----------
    passed_in
        What was passed in. The weights its optimizers train have the shapes to look for.
    kept
        What the loop keeps with `ScriptRun.keep`.
    warn
        Called with the message.
    """

    def __init__(self, passed_in: PassedIn, kept: KeptValues, warn: Callable[[str], None]) -> None:
        self._passed_in, self._kept = passed_in, kept
        self._weights = [weight for optimizer in passed_in.optimizers for weight in _trained(optimizer)]
        self._warn = warn
        self._before: dict[int, tuple[Any, int]] = {}  # the holder is kept alive, so that its id is not reused

    def first(self) -> None:
        """Call after the first step."""
        self._before = {id(holder): (holder, sampled(tensors)) for _, holder, tensors in self._found()}

    def second(self) -> None:
        """Call after the second step."""
        before, self._before = self._before, {}
        now = [(name, id(holder), sampled(tensors)) for name, holder, tensors in self._found()]
        changed = [name for name, key, state in now if key in before and before[key][1] != state]
        if changed:
            self._warn(
                f"steps change tensors like the weights in {', '.join(sorted(changed))}, which no checkpoint contains: "
                "a resume is exact only if no step, and nothing after the loop, depends on them. Pass in an object "
                "with state_dict() and load_state_dict() that holds them, such as torch's AveragedModel (ema=ema)"
            )

    def _found(self) -> list[tuple[str, Any, list[Tensor]]]:
        return found_or_nothing(self._like_the_weights())

    def _like_the_weights(self) -> Iterator[tuple[str, Any, list[Tensor]]]:
        wanted = Counter(weight.shape for weight in self._weights)
        held = {
            tensor.data_ptr() for tensor in (*self._passed_in.tensors(), *self._kept.tensors()) if has_values(tensor)
        }
        held |= {weight.grad.data_ptr() for weight in self._weights if weight.grad is not None}
        given = {_mark_of(tensor) for tensor in self._passed_in.states() if has_values(tensor)}
        of_optimizers = {
            id(part) for _, part in reachable((("", own) for own in self._passed_in.optimizers), _IN_OPTIMIZER)
        }
        for name, holder in reachable(running_variables(), _DEPTH):
            values = holder.values() if isinstance(holder, dict) else holder
            if not isinstance(holder, (dict, list)) or len(values) < len(self._weights) or id(holder) in of_optimizers:
                continue
            tensors = [value for value in values if type(value) in (Tensor, nn.Parameter) and has_values(value)]
            strange = [tensor for tensor in tensors if tensor.data_ptr() not in held and _mark_of(tensor) not in given]
            if wanted and not wanted - Counter(tensor.shape for tensor in strange):
                yield name, holder, strange


def _mark_of(tensor: Tensor) -> tuple[torch.Size, int]:
    """Identifies a copy: state_dict() of an object passed in may return copies of its tensors."""
    return tensor.shape, sampled([tensor])


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
