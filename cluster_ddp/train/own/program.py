"""Inspects the program around a custom loop: the running functions, their variables, and what these reach."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar

import numpy as np
import torch.utils.data as torch_data
from torch import Tensor, nn

from cluster_ddp.train.objects.inner_parts import can_be_seen, inner_parts
from cluster_ddp.train.objects.whose_code import is_ours

_CLOSED = (Tensor, nn.Module, np.ndarray, type, ModuleType, torch_data.Dataset, torch_data.DataLoader, str, int, float)
_Found = TypeVar("_Found")
_OURS = __name__.partition(".")[0]
_WIDTH = 2000  # a list or dict with more parts is not searched
_MAX_OBJECTS = 50_000  # objects searched per level: 0.1 s
# Most objects are of these classes, none of which is searched for; those of derived classes are.
_COMMON = {dict, list, tuple, set, FunctionType, FrameType, CellType, type, WrapperDescriptorType, MethodDescriptorType,
           BuiltinFunctionType, GetSetDescriptorType, weakref.ref, property, staticmethod}  # fmt: skip
_searches: list[dict[Any, Any]] = []  # what each block of `one_search` has found so far; the innermost comes last


def running_frames() -> Iterator[FrameType]:
    """The frames of the running functions, innermost first, without those of this package and torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (_OURS, "torch"):
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function, by name, without keeping their values alive in the frame.

    Before Python 3.13, a frame whose ``f_locals`` was read keeps that dict, with a batch and its logits, until the
    function returns.
    """
    found = dict(frame.f_locals)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()
    return found


def running_variables() -> list[tuple[str, Any]]:
    """The variables of all running functions, by name."""
    return [item for frame in running_frames() for item in variables_of(frame).items()]


def living(*kinds: type) -> list[Any]:
    """All objects of these classes and of those derived from them, wherever the program holds them."""
    objects = once("living", _uncommon) if _searches else gc.get_objects()
    return [held for held in objects if issubclass(type(held), kinds)]  # `isinstance` would ask the objects


@contextlib.contextmanager
def one_search() -> Iterator[None]:
    """Let all calls of `living` in the block share one search, which takes 50 ms or more: torch makes 200,000 objects.

    So it is with all that `once` finds. Until the block ends, what has been found lives on, and what is created since
    is not found.
    """
    _searches.append({})
    try:
        yield
    finally:
        _searches.pop()


def once(key: Hashable, find: Callable[[], _Found]) -> _Found:
    """What `find` returns; in a block of `one_search` it is called once for each key."""
    if not _searches:
        return find()
    found = _searches[-1]
    if key not in found:
        found[key] = find()
    return found[key]  # type: ignore[no-any-return]


def _uncommon() -> list[Any]:
    return [held for held in gc.get_objects() if type(held) not in _COMMON]


def found_or_nothing(search: Iterator[_Found]) -> list[_Found]:
    """What a search through a program finds; empty if it fails, as on a proxy object that raises when inspected."""
    with contextlib.suppress(Exception):
        return list(search)
    return []


def reachable(holders: Iterable[tuple[str, Any]], depth: int) -> Iterator[tuple[str, Any]]:
    """The objects given, and what they hold in attributes, lists and dicts, each with a readable name.

    Models, tensors, arrays, data sets and this package's own objects, such as that of `ScriptRun.keep`, are not
    searched, and proxies that cannot be inspected are left out.

    Parameters
    ----------
    depth
        Number of levels, including the objects given.
    """
    seen: set[int] = set()
    level = list(holders)
    for _ in range(depth):
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) not in seen and can_be_seen(value):
                seen.add(id(value))
                yield name, value
                if len(inner) < _MAX_OBJECTS:
                    inner += _parts(name, value)
        level = inner


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if len(value) <= _WIDTH:
            yield from ((f"{name}[{_name_of(key)}]", part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple)):
        if len(value) <= _WIDTH:
            yield from ((f"{name}[{number}]", part) for number, part in enumerate(list(value)))
    elif not (isinstance(value, _CLOSED) or is_ours(value)):
        yield from ((f"{name}.{part}", held) for part, held in inner_parts(value))


def _name_of(key: Any) -> str:
    """The name of a dict key; the repr of a tensor would be slow."""
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__
