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
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.randomness import parts_of
from cluster_ddp.train.state.inner_parts import CONTAINERS, HOLDERS, PLAIN, can_be_seen, elements, length
from cluster_ddp.train.state.surroundings import modules_around
from cluster_ddp.train.whose_code import is_of_user

_FAR = 1_000_000  # longer lists and dicts are left alone
_DEPTH = 3  # how deep in a new value a model is looked for
_LISTS = (list, set, collections.deque)


@contextlib.contextmanager
def undone(task: object) -> Iterator[None]:
    """Restore afterwards what the attributes of the task and of other objects of the user's hold, and their modules.

    Covers their lists, dicts, sets and namespaces as well; in what belongs to libraries, only models and optimizers,
    since others may change the rest meanwhile, and so may threads of the user's. The contents of tensors are not
    restored.
    """
    modules = list(modules_around([task]))
    names = {module.__name__ for module in modules}
    variables = [value for module in modules for value in list(vars(module).values()) if can_be_seen(value)]
    classes = {value: None for value in variables if isinstance(value, type) and value.__module__ in names}
    of_classes = [value for kind in classes for value in list(vars(kind).values())]
    kept: list[tuple[Any, Any, bool]] = [(kind, dict(vars(kind)), True) for kind in classes]
    kept += [(vars(module), dict(vars(module)), True) for module in modules]
    own = {id(value) for value in (*variables, *of_classes)}
    for part in parts_of(task, *variables, *of_classes):
        is_own = is_of_user(type(part).__module__) or (id(part) in own and isinstance(part, (*CONTAINERS, *HOLDERS)))
        if (place := _place_of(part)) is not None and length(place) <= _FAR:
            kept.append((place, _copied(place), is_own))
            own.update(map(id, elements(place)) if is_own else ())
    try:
        yield
    finally:
        has_threads = _has_threads()
        for place, was, is_own in kept:
            _put_back(place, was, has_all=is_own and not has_threads)


@contextlib.contextmanager
def numbers_undone(*holders: object) -> Iterator[None]:
    """Restore afterwards the numbers and tensors that objects, their parts and their modules hold, also in lists.

    Flags of the user's objects, too, unless something has been made that must not be made once more, such as a hook: a
    flag may say that it is there. Where a flag stays, so does what was not there before.
    """
    variables = [vars(module) for module in modules_around(holders)]
    parts = parts_of(*holders, *variables, *(value for each in variables for value in list(each.values())))
    places = [(place, is_of_user(type(part).__module__)) for part in parts if (place := _place_of(part)) is not None]
    places = [(place, is_own) for place, is_own in places if not isinstance(place, set) and length(place) <= _FAR]
    kept = [(place, _copied(place), is_own or any(place is each for each in variables)) for place, is_own in places]
    try:
        yield
    finally:
        has_made = any(_is_made(value) for place, before, _ in kept for value in _new_values(place, before))
        for place, before, is_own in kept:
            if isinstance(place, dict):
                _put_back_numbers(place, before, has_flags=is_own and not has_made)
            elif all(map(_is_of_numbers, (*before, *place))):
                place.clear()
                place.extend(before)


def _new_values(place: Any, before: Any) -> list[Any]:
    if isinstance(place, dict):
        return [value for key, value in list(dict.items(place)) if before.get(key) is not value]
    return list(elements(place))[len(before) :]


def _put_back_numbers(place: dict[Any, Any], before: dict[Any, Any], *, has_flags: bool) -> None:
    changed = {key: value for key, value in list(dict.items(place)) if before.get(key) is not value}
    keeps_flags = not has_flags and any(type(value) is bool for value in changed.values())
    for key, value in changed.items():
        was = before.get(key)
        is_flag = type(value) is bool and (was is None or type(was) is bool)
        are_numbers = _is_of_numbers(value) and _is_of_numbers(was) and not (was is None and keeps_flags)
        if (is_flag and has_flags) or are_numbers:
            _put_back_entry(place, key, before)


def _is_of_numbers(value: object, depth: int = 3) -> bool:
    """Whether it is a number or a tensor that is not trained, or a list or the like of such."""
    if value is None or type(value) in (int, float) or (isinstance(value, Tensor) and not value.requires_grad):
        return True
    if not depth or not issubclass(type(value), (list, tuple, dict, collections.deque)):
        return False
    parts = elements(value)
    return all(type(part) in PLAIN or _is_of_numbers(part, depth - 1) for part in parts)


def _is_made(value: object) -> bool:
    """Whether the next call of what has made it would make it once more, unless a flag says that it is there."""
    is_computed = isinstance(value, Tensor) and not value.is_leaf
    return not (type(value) in PLAIN or is_computed or _is_of_numbers(value))


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
