"""Which function of the program a call runs, and which variables that finds outside of itself."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import ChainMap
from collections.abc import MutableMapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from cluster_ddp.train.objects.whose_code import is_library_file, is_our_file, is_own_class

CLOSED = (Optimizer, Dataset, DataLoader)  # passed in, or looked at by other watches


def function_of(called: Any) -> tuple[FunctionType | None, Any]:
    """The function of the program that a call runs, and the object whose method it is."""
    called = called.func if isinstance(called, functools.partial) and not called.args else called
    bound = getattr(called, "__self__", None)
    if not (inspect.isroutine(called) or isinstance(called, type)) and is_own_class(type(called)):
        method = "forward" if isinstance(called, nn.Module) else "__call__"
        bound, called = called, inspect.getattr_static(type(called), method, None)
    found = inspect.unwrap(getattr(called, "__func__", called)) if callable(called) else None
    if not isinstance(found, FunctionType) or isinstance(bound, CLOSED):
        return None, None
    file = found.__code__.co_filename
    return (None, None) if is_library_file(file) or is_our_file(file) else (found, bound)


def attribute_of(owner: Any, name: str) -> Any:
    """An attribute of an object; none that is computed, which might draw a number or take a batch.

    Raises
    ------
    AttributeError
        There is none.
    """
    found = inspect.getattr_static(type(owner), name, None)
    if isinstance(found, (property, functools.cached_property)) and name not in getattr(owner, "__dict__", {}):
        raise AttributeError(name)
    return getattr(owner, name)


def code_in(kind: type, method: str) -> CodeType | None:
    """The code of a method that a class defines itself."""
    return getattr(inspect.unwrap(vars(kind)[method]), "__code__", None) if method in vars(kind) else None


def first_parameter(function: Any) -> str:
    """Its name, such as self."""
    return str(function.__code__.co_varnames[0])


def outside_of(function: FunctionType) -> MutableMapping[str, Any]:
    """The variables that a function finds outside of itself."""
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is set only later
            cells[name] = cell.cell_contents
    own = dict.fromkeys((*function.__code__.co_varnames, *function.__code__.co_cellvars))
    return ChainMap(own, cells, function.__globals__)
