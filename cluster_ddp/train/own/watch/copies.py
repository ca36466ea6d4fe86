"""Detects weight averages that a custom loop keeps in lists and dicts of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cluster_ddp.train.optimizer import parameters_of
from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import found_or_nothing, reachable, running_variables
from cluster_ddp.train.own.values import addresses, has_values, sampled
from cluster_ddp.train.own.watch.reported import Report

_DEPTH = 3  # a variable's value, its attributes, and what these hold
_IN_OPTIMIZER = 4  # what an optimizer holds is checked with its state


def watch_copies(passed_in: PassedIn, kept: KeptValues, report: Report) -> Iterator[None]:
    """Warn, after the second step, about lists and dicts with a tensor for each weight that steps change.

    An example is ``shadow[name] = decay * shadow[name] + (1 - decay) * weight``, in a variable of a running function or
    in an attribute of one.

    Parameters
    ----------
    passed_in
        What was passed in. The weights its optimizers train have the shapes to look for.
    kept
        What the loop keeps with `ScriptRun.keep`.
    report
        Called with the message.
    """
    # The holders are kept alive, so that their ids are not reused.
    before = {id(holder): (holder, state) for _, holder, state in found_or_nothing(_averages(passed_in, kept))}
    yield
    now = found_or_nothing(_averages(passed_in, kept))
    if changed := [name for name, at, state in now if id(at) in before and before[id(at)][1] != state]:
        report(
            f"steps change tensors with the shapes of the weights, in {', '.join(sorted(changed))}, which no "
            "checkpoint contains: a resume is exact only if no step, and nothing after the loop, depends on them. Pass "
            "in an object with state_dict() and load_state_dict() that holds them, such as torch's AveragedModel "
            "(ema=ema)",
            changed,
        )


def _averages(passed_in: PassedIn, kept: KeptValues) -> Iterator[tuple[str, Any, int]]:
    """Lists and dicts with a tensor like each weight, by name, with a fingerprint of these tensors."""
    weights = [weight for weight in parameters_of(*passed_in.optimizers) if weight.requires_grad]
    wanted = Counter(weight.shape for weight in weights)
    held = addresses((*passed_in.tensors(), *kept.tensors()))
    held |= {weight.grad.data_ptr() for weight in weights if weight.grad is not None}
    given = {_mark_of(tensor) for tensor in passed_in.states() if has_values(tensor)}
    of_optimizers = {id(part) for _, part in reachable((("", own) for own in passed_in.optimizers), _IN_OPTIMIZER)}
    for name, holder in reachable(running_variables(), _DEPTH):
        values = holder.values() if isinstance(holder, dict) else holder
        if not isinstance(holder, (dict, list)) or len(values) < len(weights) or id(holder) in of_optimizers:
            continue
        tensors = [value for value in values if type(value) in (Tensor, nn.Parameter) and has_values(value)]
        strange = [tensor for tensor in tensors if tensor.data_ptr() not in held and _mark_of(tensor) not in given]
        if wanted and not wanted - Counter(tensor.shape for tensor in strange):
            yield name, holder, sampled(strange)


def _mark_of(tensor: Tensor) -> tuple[torch.Size, int]:
    """Identifies a copy: state_dict() of an object passed in may return copies of its tensors."""
    return tensor.shape, sampled([tensor])
