"""What an object is made of, wherever Python lets it hold something."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset, collections.deque)


def can_be_seen(value: object) -> bool:
    """Whether it can be asked what it is: not a proxy of what is not there. What a proxy is of is held elsewhere."""
    try:
        return type(value) not in weakref.ProxyTypes and value.__class__ is not None
    except Exception:
        return False


def length(container: Any) -> int:
    """How many elements one of Python's containers has; a class derived from it may say otherwise, or raise."""
    return int(_kind(container).__len__(container))


def elements(container: Any) -> Iterator[Any]:
    """The elements of one of Python's containers, of a dict the values, whatever a class derived from it gives."""
    return iter(dict.values(container)) if isinstance(container, dict) else _kind(container).__iter__(container)


def _kind(container: Any) -> Any:
    return next(kind for kind in CONTAINERS if isinstance(container, kind))


def inner_parts(value: object) -> Iterator[tuple[str, Any]]:
    """Give the parts of an object by name.

    Those of a plain object are its attributes, also in slots; those of a function what it has closed over, its defaults
    and its attributes; those of a method its object; those of a partial what was given to it.
    """
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    else:
        if isinstance(value, FunctionType):
            yield from _closed_over(value)
            yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
        yield from list(getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            names = vars(kind).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield name, getattr(value, name)


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
