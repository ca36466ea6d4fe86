"""Detects what a custom loop computes its loss from and steps change in place, such as an object's running averages."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.objects.syntax import assigned, below, built_on_itself, is_of_clock
from cluster_ddp.train.objects.whose_code import is_library, is_ours, is_own_class
from cluster_ddp.train.own.program import running_frames, variables_of
from cluster_ddp.train.own.values import fingerprint_of, has_values
from cluster_ddp.train.own.watch.bodies import Text, in_running, tree_of_object, value_of
from cluster_ddp.train.own.watch.in_functions import carried_in
from cluster_ddp.train.own.watch.matters import changed_in_place_after_use, feeding_loss, reset_each_time
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved

_LISTS = (list, collections.deque)
_NUMBERS = (int, float)
_METRIC = "metric_state"  # what a metric of torchmetrics has summed up
_OTHERS = (nn.Module, Optimizer, Dataset, DataLoader)  # passed in, or looked at by other watches
_ARRAYS = (Tensor, np.ndarray)
_MAX_PARTS = 1000  # parts of a list or dict that are compared
_MAX_ELEMENTS = 2**24  # of a tensor that is compared as a whole, since a step may change a few rows of it
_Parts = dict[Any, int | float]


def watch_in_loss(saved: Saved, report: Reported) -> Iterator[None]:
    """Warn, after the second step, about lists, objects, tensors and arrays that steps change and the loss depends on.

    Tensors and arrays count if the loop computes the loss from them before it changes them in place, such as a bank of
    features; those that each step fills first do not.

    The same holds for numbers in dicts, such as a `Counter` of the labels, for those in objects of libraries other than
    torch and the like, such as that of a progress bar, for the metrics of torchmetrics, and for what functions that are
    called for the loss compute from its previous value outside of themselves.

    The source of the running functions shows what the loss depends on, so that whatever only prints is not reported.
    Variables that the loop sets are left to `watch_counts` and `watch_carried`.

    Parameters
    ----------
    saved
        What need not be checked.
    report
        Called with the message; what it has reported before is not reported again.
    """
    find = functools.partial(_feeding_in, saved=saved)
    before = dict(in_running(find))
    yield
    now = dict(in_running(find))
    kept = [value for value in saved.kept.values.values() if type(value) in _NUMBERS]
    changed = [name for name, parts in now.items() if _has_changed(before.get(name, parts), parts, kept)]
    if names := sorted(name for name in changed if not report.has(name)):
        report(
            f"steps change {', '.join(names)}, from which the loss or the learning rate is computed and which no "
            "checkpoint contains: a resume starts with what the program puts there before the loop, and is not exact. "
            "Keep lists, tensors and arrays, for example with kept = run.keep(losses=losses); give an object "
            "state_dict() and load_state_dict(), and pass it in",
            names,
        )


def _feeding_in(text: Text, frame: FrameType, saved: Saved) -> Iterator[tuple[str, _Parts]]:
    """What a running function computes the loss from and does not set itself, with what is in it now."""
    if not text.loops:
        return
    setting = (text.loops[0], *below(text.loops[0], text.parents))
    resets = reset_each_time(text)
    set_here = {name.partition("[")[0] for node in setting for name in assigned(node)}
    set_here |= {name for name, is_seeded in resets.items() if is_seeded}
    feeding = feeding_loss(text)
    for name in feeding.names:
        parts = name.split(".")
        if not set_here.isdisjoint(".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            continue
        with contextlib.suppress(Exception):  # not a variable or an attribute, or it does not let itself be asked
            for carried, value in carried_in(value_of(name, frame)):
                if not saved.has(value):
                    yield carried, _contents_of(value)
        with contextlib.suppress(Exception):  # not a variable or an attribute
            found = value_of(name, frame)
            if isinstance(found, _ARRAYS):
                if not saved.has_named(name, frame) and changed_in_place_after_use(name, text, feeding.statements):
                    yield name, {None: _whole(found)}
                continue
            if inspect.ismethod(found) or not (isinstance(found, (*_LISTS, dict)) or is_own_class(type(found))):
                name = name.rpartition(".")[0]
                found = value_of(name, frame)
            if _may_change(found) and not saved.has_named(name, frame):
                yield name, _contents(found, without=_set_by_reset(found) if name in resets else set())


def _contents_of(value: Any) -> _Parts:
    """The same for a number, a tensor or an array, too; nothing of any other object."""
    if type(value) in _NUMBERS:
        return {None: value}
    if isinstance(value, _ARRAYS):
        return {None: _whole(value)}
    return _contents(value, without=set()) if isinstance(value, (*_LISTS, dict)) else {}


def _may_change(found: Any) -> bool:
    is_own = is_own_class(type(found)) and not isinstance(found, _OTHERS) and not _runs_loop(found)
    return is_own or isinstance(found, (*_LISTS, dict)) or _is_of_library(found)


def _is_of_library(found: Any) -> bool:
    """Whether this is an object of a library that may count or sum up something, such as a progress bar or a metric."""
    if isinstance(found, _OTHERS):
        return hasattr(found, _METRIC)
    kind = type(found)
    is_object = (
        hasattr(found, "__dict__") and not isinstance(found, (type, ModuleType)) and not inspect.isroutine(found)
    )
    return is_object and not (is_library(kind.__module__) or is_ours(found) or is_own_class(kind))


def _has_changed(was: _Parts, now: _Parts, kept: Sequence[float]) -> bool:
    """Whether it has, in more than numbers that the loop keeps."""
    return len(was) != len(now) or any(was.get(key) != part and part not in kept for key, part in now.items())


def _runs_loop(value: Any) -> bool:
    """Whether a method of this object is running: it holds all kinds of things."""
    return any(
        hasattr(type(value), frame.f_code.co_name)
        and any(variables_of(frame).get(name) is value for name in frame.f_code.co_varnames[:1])
        for frame in running_frames()
    )


def _contents(value: Any, without: set[str]) -> _Parts:
    """The numbers that a value holds, and fingerprints of whatever else it holds, without what was just computed."""
    parts = [(key, part) for key, part in _parts_of(value)[-_MAX_PARTS:] if getattr(part, "grad_fn", None) is None]
    parts = [(key, part) for key, part in parts if key not in without]
    return {key: part if type(part) in _NUMBERS else fingerprint_of(part) for key, part in parts}


def _whole(value: Tensor | np.ndarray[Any, Any]) -> int:
    """A fingerprint of all elements, unless there are too many."""
    if isinstance(value, np.ndarray):
        return fingerprint(value) if value.size <= _MAX_ELEMENTS else fingerprint_of(value)
    return (
        fingerprint(value.detach()) if has_values(value) and value.numel() <= _MAX_ELEMENTS else fingerprint_of(value)
    )


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, _LISTS):
        return list(enumerate(value))
    if isinstance(value, dict):  # what hooks put into one, say, each step sets before it reads it
        return [(key, part) for key, part in list(value.items()) if type(part) in _NUMBERS]
    if isinstance(value, nn.Module):
        return list(getattr(value, _METRIC).items())
    if not is_own_class(type(value)):
        return [(key, part) for key, part in list(vars(value).items()) if type(part) in _NUMBERS]
    own = {name for kind in type(value).__mro__ if is_own_class(kind) for name in _builds_on_itself(kind)}
    return [(name, part) for name, part in vars(value).items() if name in own]


def _set_by_reset(value: Any) -> set[str]:
    """The attributes that an object's `reset` sets whatever happens."""
    methods = tree_of_object(getattr(type(value), "reset", None)).body
    statements = (statement for method in methods for statement in getattr(method, "body", []))
    return {name.partition(".")[2] for statement in statements for name in assigned(statement)}


def _builds_on_itself(kind: type) -> Iterator[str]:
    """The attributes that a class sets to something computed from them; others may be set before they are read."""
    for node in ast.walk(tree_of_object(kind)):
        names = (name for name in built_on_itself(node) if name.count(".") == 1 and not is_of_clock(node))
        yield from (name.partition(".")[2] for name in names)
