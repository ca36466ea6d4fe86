"""Finds the parts that an object of the user's is made of, wherever Python lets it hold something.

Used to find random generators to seed, and state that no checkpoint contains.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import weakref
from collections.abc import Iterator
from types import (
    BuiltinMethodType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeGuard

CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset, collections.deque)

# Classes of libraries whose purpose is to hold what the user puts into them.
HOLDERS = (SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap)

PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


def can_be_seen(value: object) -> bool:
    """Whether a value can be inspected: it is no weak proxy, whose target is held elsewhere, and has a class."""
    try:
        return type(value) not in weakref.ProxyTypes and value.__class__ is not None
    except Exception:
        return False


def has_attributes(value: object) -> bool:
    """Whether an object has a dict of attributes; if not, a ``__getattr__`` of its own is asked, which may raise."""
    try:
        return hasattr(value, "__dict__")
    except Exception:
        return False


def length(container: Any) -> int:
    """The number of elements of a built-in container, even if a derived class reports something else, or raises."""
    return int(_kind(container).__len__(container))


def elements(container: Any) -> Iterator[Any]:
    """The elements of a built-in container (of a dict, the values), ignoring overrides in derived classes."""
    return iter(dict.values(container)) if isinstance(container, dict) else _kind(container).__iter__(container)


def _kind(container: Any) -> Any:
    kind = type(container)
    return kind if kind in CONTAINERS else next(kind for kind in CONTAINERS if isinstance(container, kind))


def inner_parts(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object by name.

    For a plain object: its attributes, including slots; for a function: its closure, defaults and attributes; for a
    method, also of a list or the like: its object; for a partial: its function and arguments.
    """
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif is_bound(value):
        yield "self", value.__self__
    else:
        if isinstance(value, FunctionType):
            yield from _closed_over(value)
            yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
        if has_attributes(value):
            yield from list(getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            # Of classes with __slots__, whose names Python changes if they are private.
            for name, part in list(vars(kind).items()) if "__slots__" in vars(kind) else ():
                if isinstance(part, MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # not filled yet
                        yield name, part.__get__(value)


def is_bound(value: object) -> TypeGuard[MethodType | BuiltinMethodType | MethodWrapperType]:
    """Whether it is a method of an object, such as `append` of a list; other compiled functions belong to a module."""
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
        return not isinstance(value.__self__, (ModuleType, type, type(None)))
    return isinstance(value, MethodType)


def compiled_numbers(value: object) -> Iterator[tuple[str, Any]]:
    """Yield numbers, strings and the like that a class of C, C++ or Cython shows as attributes, such as a size."""
    for kind in type(value).__mro__:
        for name, shown in list(vars(kind).items()):
            getter = shown.fget if isinstance(shown, property) else None
            is_compiled = getter is not None and not isinstance(getter, (FunctionType, functools.partial))
            if is_compiled or isinstance(shown, (GetSetDescriptorType, MemberDescriptorType)):
                with contextlib.suppress(Exception):
                    if not name.startswith("__") and type(part := getattr(value, name)) in PLAIN:
                        yield name, part
    size = getattr(type(value), "__len__", None)
    if size is not None and not isinstance(size, FunctionType):
        yield "__len__", size(value)


def closed_over(function: FunctionType) -> list[Any]:
    """What a function has closed over."""
    return [part for _, part in _closed_over(function)]


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
