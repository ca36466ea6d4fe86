"""Sees averages of the weights that a loop of one's own keeps in lists and dicts of tensors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.own.handed import Handed
from cluster_ddp.train.own.program import reachable, running_frames, variables_of
from cluster_ddp.train.own.values import has_values, sampled

_CHECKS = 2
_DEPTH = 3  # of a variable: its value, that one's attributes, and what these hold


class Copies:
    """Tells, after the second step, of lists and dicts that hold a tensor for each weight, and that steps change.

    Such as ``shadow[name] = decay * shadow[name] + (1 - decay) * weight``, in a variable of a function that runs, or in
    an attribute of one.

    Parameters
    ----------
    handed
        What is kept; that its optimizers train has the shapes that are looked for.
    tell
        Takes the message.
    """

    def __init__(self, handed: Handed, tell: Callable[[str], None]) -> None:
        self._handed = handed
        self._weights = [weight for optimizer in handed.optimizers for weight in _trained(optimizer)]
        self._tell = tell
        self._checks = 0
        self._before: dict[int, tuple[Any, int]] = {}  # with the holder, whose place in memory another would take

    def check(self) -> None:
        """Call after each step; what the program holds is looked through only after the first two."""
        if self._checks == _CHECKS:
            return
        self._checks += 1
        now: dict[int, tuple[str, Any, int]] = {}
        with contextlib.suppress(Exception):  # of proxies, which do much when they are asked what they are
            now = {id(holder): (name, holder, sampled(tensors)) for name, holder, tensors in self._found()}
        if self._checks < _CHECKS:
            self._before = {key: (holder, state) for key, (_, holder, state) in now.items()}
            return
        before, self._before = self._before, {}
        changed = [name for key, (name, _, state) in now.items() if key in before and before[key][1] != state]
        if changed:
            self._tell(
                f"steps change tensors like the weights in {', '.join(sorted(changed))}, which no checkpoint holds: a "
                "resume is exact only where no step, and nothing after the loop, depends on them. Hand over an object "
                "with state_dict() and load_state_dict() that holds them, such as torch's AveragedModel (ema=ema)"
            )

    def _found(self) -> Iterator[tuple[str, Any, list[Tensor]]]:
        wanted = Counter(weight.shape for weight in self._weights)
        own = {tensor.data_ptr() for tensor in self._handed.tensors() if has_values(tensor)}
        own |= {weight.grad.data_ptr() for weight in self._weights if weight.grad is not None}
        variables = [item for frame in running_frames() for item in variables_of(frame).items()]
        for name, holder in reachable(variables, _DEPTH):
            values = holder.values() if isinstance(holder, dict) else holder
            if not isinstance(holder, (dict, list)) or len(values) < len(self._weights):
                continue
            tensors = [value for value in values if type(value) in (Tensor, nn.Parameter) and has_values(value)]
            strange = [tensor for tensor in tensors if tensor.data_ptr() not in own]
            if wanted and not wanted - Counter(tensor.shape for tensor in strange):
                yield name, holder, strange


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
