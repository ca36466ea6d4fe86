"""Undoes what the user's code changes when it is called once more for a check, while the task goes on training.

A task may keep its networks in a dict, or in a variable of its module, and find there what it trains: without this,
those made for the check would take their place. An object in it may lose what load_state_dict() does not put back.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.objects.held import are_hooks, global_hooks, hooks_of_tensor
from cluster_ddp.train.objects.inner_parts import CONTAINERS, HOLDERS, can_be_seen, elements, length
from cluster_ddp.train.objects.surroundings import modules_around
from cluster_ddp.train.objects.whose_code import is_of_user
from cluster_ddp.train.randomness import parts_of

_FAR = 1_000_000  # longer lists and dicts are left alone
_DEPTH = 3  # how deep in a new value a model is looked for
_LISTS = (list, set, collections.deque)

_Kept = tuple[Any, Any, bool]
"""A place, what it held, and whether it is the user's."""


@contextlib.contextmanager
def undone(task: object) -> Iterator[None]:
    """Restore afterwards what the attributes of the task and of other objects of the user's hold, and their modules.

    Covers their lists, dicts, sets and namespaces as well; in what belongs to libraries, only models and optimizers,
    since others may change the rest meanwhile, and so may threads of the user's. Hooks are always restored. The
    contents of tensors are not.
    """
    parts, kept = _kept([task], lambda part: is_of_user(type(part).__module__))
    hooks = [(held, dict(held)) for held in (*global_hooks(), *_hooks_in(parts))]
    of_tensors = [
        (tensor, {name: dict(held) for name, held in hooks_of_tensor(tensor).items()})
        for tensor in parts
        if isinstance(tensor, Tensor)
    ]
    try:
        yield
    finally:
        _put_all_back(kept)
        for tensor, were in of_tensors:
            hooks += [(held, were.get(name, {})) for name, held in hooks_of_tensor(tensor).items()]
        for held, was in hooks:
            _put_back(held, was, has_all=True)


def _hooks_in(parts: Iterable[object]) -> Iterator[Any]:
    """The dicts of the hooks of modules and optimizers."""
    for part in parts:
        if isinstance(part, (nn.Module, Optimizer)):
            yield from (value for value in list(vars(part).values()) if are_hooks(value))


def _kept(holders: Iterable[object], is_own_object: Callable[[object], bool]) -> tuple[list[Any], list[_Kept]]:
    """What objects and the modules around them hold: all parts, and the places to put back."""
    holders = list(holders)
    modules = list(modules_around(holders))
    names = {module.__name__ for module in modules}
    variables = [value for module in modules for value in list(vars(module).values()) if can_be_seen(value)]
    classes = {value: None for value in variables if isinstance(value, type) and value.__module__ in names}
    of_classes = [value for kind in classes for value in list(vars(kind).values())]
    kept: list[_Kept] = [(kind, dict(vars(kind)), True) for kind in classes]
    kept += [(vars(module), dict(vars(module)), True) for module in modules]
    own = {id(value) for value in (*variables, *of_classes)}
    parts = list(parts_of(*holders, *variables, *of_classes))
    for place in [place for part in parts if is_own_object(part) and (place := _place_of(part)) is not None]:
        own.update((id(place), *map(id, elements(place))))
    for part in parts:
        is_own = is_own_object(part) or (id(part) in own and isinstance(part, (*CONTAINERS, *HOLDERS)))
        if (place := _place_of(part)) is not None and length(place) <= _FAR:
            kept.append((place, _copied(place), is_own))
            own.update(map(id, elements(place)) if is_own else ())
    return parts, kept


def _put_all_back(kept: list[_Kept]) -> None:
    has_threads = _has_threads()
    for place, was, is_own in kept:
        _put_back(place, was, has_all=is_own and not has_threads)


def _place_of(part: Any) -> Any:
    """Where an object holds what it holds: itself, if it is a list or the like, or its attributes, if it has any."""
    with contextlib.suppress(Exception):  # it may have no attributes, although it has a class
        # By its type: a proxy may say that it is a dict.
        place = part if issubclass(type(part), (dict, *_LISTS)) else getattr(part, "__dict__", None)
        return place if isinstance(place, (dict, *_LISTS)) else None
    return None


def _copied(place: Any) -> Any:
    return dict(dict.items(place)) if isinstance(place, dict) else list(elements(place))


def _has_threads() -> bool:
    """Whether another thread runs code of the user's."""
    others = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    return any(
        is_of_user(str(at.f_globals.get("__name__"))) for frame in others for at, _ in traceback.walk_stack(frame)
    )


def _put_back(place: Any, before: Any, *, has_all: bool) -> None:
    if isinstance(place, _LISTS):
        now = list(elements(place))
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return
        if has_all or _are_trained(now):
            place.clear()
            (place.update if isinstance(place, set) else place.extend)(before)
        return
    entries: dict[Any, Any] = dict(vars(place)) if isinstance(place, type) else dict(dict.items(place))
    for key, value in entries.items():
        is_other = key not in before or before[key] is not value
        if is_other and ((has_all and not isinstance(value, ModuleType)) or _are_trained([value])):
            _put_back_entry(place, key, before)
    if has_all and not before.keys() <= entries.keys():
        for key in before:  # all, in this order
            if not isinstance(place, type):
                _kind(place).pop(place, key, None)
            _put_back_entry(place, key, before)


def _put_back_entry(place: Any, key: Any, before: dict[Any, Any]) -> None:
    if not isinstance(place, type):
        if key in before:
            _kind(place).__setitem__(place, key, before[key])
        else:
            _kind(place).__delitem__(place, key)
    elif key not in before:
        delattr(place, key)
    elif vars(place).get(key) is not before[key]:
        setattr(place, key, before[key])


def _kind(place: Any) -> Any:
    """Whose methods to call: not overridden ones; but an OrderedDict has an order of its own, which dict's spoil."""
    return collections.OrderedDict if isinstance(place, collections.OrderedDict) else dict


def _are_trained(values: list[Any]) -> bool:
    """Whether models or optimizers are among the values or in them; threads of the user's may change all others."""
    return any(isinstance(part, (nn.Module, nn.Parameter, Optimizer)) for part in parts_of(*values, depth=_DEPTH))
