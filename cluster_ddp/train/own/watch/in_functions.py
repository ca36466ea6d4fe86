"""Finds what functions carry from call to call: variables outside of them, attributes of functions and of classes."""

from __future__ import annotations

import ast
import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from cluster_ddp.train.objects.syntax import (
    FUNCTIONS,
    added_to,
    built_on_itself,
    is_held,
    is_of_clock,
    is_read,
    name_of,
    statement_of,
)
from cluster_ddp.train.objects.whose_code import is_library_file, is_own_class
from cluster_ddp.train.own.watch.bodies import tree_of_object, with_parents
from cluster_ddp.train.own.watch.matters import only_shows

_MAX_FUNCTIONS = 50  # looked at from one call of the loop
_MISSING = object()


def carried_in(called: Any) -> Iterator[tuple[str, Any]]:
    """What calling this computes from its previous value, and where, such as ``mean in get_loss()``, with what it is.

    That is what the function, or one of the program's that it calls, sets by ``nonlocal mean`` or ``global mean``, as
    ``get_loss.mean = 0.9 * get_loss.mean + ...``, or as an attribute of a class; not what it only shows.
    """
    todo, seen = list(_functions_of(called)), set[int]()
    for function in todo:  # it grows
        if id(function) in seen or len(seen) >= _MAX_FUNCTIONS:
            continue
        seen.add(id(function))
        scope = _outside(function)
        for node in ast.walk(tree_of_object(function)):
            if isinstance(node, ast.Call) and (name := name_of(node.func)) is not None:
                todo += _functions_of(_value_in(scope, name))
        for name in _built_and_used(function):
            if (value := _value_in(scope, name)) is not _MISSING:
                yield f"{name} in {function.__name__}()", value


def _functions_of(called: Any) -> list[types.FunctionType]:
    """The function of the program that runs when this is called, or the method; none if it is a library's."""
    if isinstance(called, nn.Module):
        called = called.forward
    elif is_own_class(type(called)):
        called = inspect.getattr_static(type(called), "__call__", None)
    called = inspect.unwrap(getattr(called, "__func__", called))
    is_own = isinstance(called, types.FunctionType) and not is_library_file(called.__code__.co_filename)
    return [called] if is_own else []


def _outside(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function finds outside of itself."""
    code, around = function.__code__, dict(function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is set only later
            around[name] = cell.cell_contents
    own = {*code.co_varnames, *code.co_cellvars}
    return {name: value for name, value in around.items() if name not in own}


def _value_in(scope: dict[str, Any], name: str) -> Any:
    """What a variable is, an item of it, or an attribute of a function or a class; `_MISSING` for anything else."""
    holder, _, key = name.partition("[")
    first, *inner = holder.split(".")
    found = scope.get(first, _MISSING)
    for part in inner:
        found = getattr(found, part, _MISSING) if isinstance(found, (types.FunctionType, type)) else _MISSING
    if key:
        found = found.get(ast.literal_eval(key.removesuffix("]")), _MISSING) if type(found) is dict else _MISSING
    return found


def _built_and_used(function: types.FunctionType) -> Iterator[str]:
    """What a function computes from its previous value, or adds to, and reads for something else, too."""
    for scope in ast.walk(tree_of_object(function)):
        parents = with_parents(scope) if isinstance(scope, FUNCTIONS) else {}
        shared = {name for node in parents if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
        changing: dict[str, list[int]] = {}  # the lines
        for node in parents:
            if isinstance(node, ast.stmt) and not is_of_clock(node):
                built = {name for name in built_on_itself(node) if name in shared or is_held(name)}
                for name in built | added_to(node):
                    changing.setdefault(name, []).append(node.lineno)
        for name, lines in sorted(changing.items()):
            uses = [statement_of(node, parents) for node in parents if is_read(node, name)]
            if any(_matters(use) and use.lineno not in lines for use in uses):
                yield name


def _matters(use: ast.stmt) -> bool:
    """Whether a statement does more than to show something."""
    return not (isinstance(use, ast.Expr) or only_shows(use))
