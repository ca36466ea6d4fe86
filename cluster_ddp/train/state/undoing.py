"""Undoes what the user's code changes when it is called once more for a check, while the task goes on training.

A task may keep its networks in a dict, or in a variable of its module, and find there what it trains: without this,
those made for the check would take their place.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cluster_ddp.train.inner_parts import can_be_seen, elements, length
from cluster_ddp.train.randomness import parts_of
from cluster_ddp.train.state.surroundings import modules_around

_FAR = 1_000_000  # longer lists and dicts are left alone
_DEPTH = 3  # how deep in a new value a model is looked for
_LISTS = (list, set, collections.deque)


@contextlib.contextmanager
def undone(task: object) -> Iterator[None]:
    """Restore afterwards which models and optimizers the task's attributes and the user's modules hold.

    Covers their lists, dicts, sets and attributes as well. The contents of tensors are not restored.
    """
    modules = list(modules_around([task]))
    names = {module.__name__ for module in modules}
    variables = [value for module in modules for value in list(vars(module).values()) if can_be_seen(value)]
    classes = {value: None for value in variables if isinstance(value, type) and value.__module__ in names}
    of_classes = [value for kind in classes for value in list(vars(kind).values())]
    kept: list[tuple[Any, Any]] = [(kind, dict(vars(kind))) for kind in classes]
    kept += [(vars(module), dict(vars(module))) for module in modules]
    for part in parts_of(task, *variables, *of_classes):
        place = None
        with contextlib.suppress(Exception):  # it may have no attributes, although it has a class
            # By its type: a proxy may say that it is a dict.
            place = part if issubclass(type(part), (dict, *_LISTS)) else getattr(part, "__dict__", None)
        if isinstance(place, dict) and length(place) <= _FAR:
            kept.append((place, dict(dict.items(place))))
        elif isinstance(place, _LISTS) and length(place) <= _FAR:
            kept.append((place, list(elements(place))))
    try:
        yield
    finally:
        for place, before in kept:
            _put_back(place, before)


def _put_back(place: Any, before: Any) -> None:
    if isinstance(place, _LISTS):
        now = list(elements(place))
        if (len(now) != len(before) or not all(map(operator.is_, now, before))) and _are_trained(now):
            place.clear()
            (place.update if isinstance(place, set) else place.extend)(before)
        return
    entries: dict[Any, Any] = dict(vars(place)) if isinstance(place, type) else dict(dict.items(place))
    for key, value in entries.items():
        if (key not in before or before[key] is not value) and _are_trained([value]):
            _put_back_entry(place, key, before)


def _put_back_entry(place: Any, key: Any, before: dict[Any, Any]) -> None:
    if isinstance(place, type) and key in before:
        setattr(place, key, before[key])
    elif isinstance(place, type):
        delattr(place, key)
    else:
        # Not overridden ones; but an OrderedDict has an order of its own, which those of dict would spoil.
        kind: Any = collections.OrderedDict if isinstance(place, collections.OrderedDict) else dict
        if key in before:
            kind.__setitem__(place, key, before[key])
        else:
            kind.__delitem__(place, key)


def _are_trained(values: list[Any]) -> bool:
    """Whether models or optimizers are among the values or in them; threads of the user's may change all others."""
    return any(isinstance(part, (nn.Module, nn.Parameter, Optimizer)) for part in parts_of(*values, depth=_DEPTH))
