"""Reads the names of a task's metrics from the source of its ``evaluate``, long before the first evaluation."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_HARMLESS = ("no_grad", "inference_mode")  # decorators that return what the function does


def metric_names(evaluate: Callable[..., Any]) -> list[str] | None:
    """The names that ``evaluate`` can give its metrics; None if its source does not show all of them.

    It does where it returns a dict with strings as keys, perhaps by a variable to which it adds more of them.
    """
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(evaluate))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(function, ast.FunctionDef) or not all(map(_is_harmless, function.decorator_list)):
        return None
    nodes = list(_own_nodes(function))
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    found: dict[str, None] = {}
    for value in returned:
        names = _keys_of_variable(value.id, nodes) if isinstance(value, ast.Name) else _keys(value)
        if names is None:
            return None
        found.update(dict.fromkeys(names))
    return list(found) if returned else None


def _is_harmless(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).removesuffix("()").rpartition(".")[2] in _HARMLESS


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own_nodes(node)


def _keys(value: ast.expr | None) -> list[str] | None:
    """The keys of a dict as it is written in the source; None if it is another expression, or they are no strings."""
    if not isinstance(value, ast.Dict):
        return None
    names = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return names if len(names) == len(value.keys) else None


def _keys_of_variable(variable: str, nodes: list[ast.AST]) -> list[str] | None:
    """As `_keys`, for a variable that is only set to such dicts, filled by key and returned."""
    uses = sum(isinstance(node, ast.Name) and node.id == variable for node in nodes)
    uses -= sum(isinstance(node, ast.Return) and _is_named(node.value, variable) for node in nodes)
    found: list[str] = []
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = _keys_set_by(target, node, variable)  # type: ignore[arg-type]
            if names is not None:
                uses -= 1
                found += names
    return None if uses else found


def _keys_set_by(target: ast.expr, assignment: ast.Assign, variable: str) -> list[str] | None:
    if isinstance(target, ast.Subscript) and _is_named(target.value, variable):
        return _keys(ast.Dict([target.slice], [assignment.value]))
    return _keys(assignment.value) if _is_named(target, variable) else None


def _is_named(node: ast.AST | None, variable: str) -> bool:
    return isinstance(node, ast.Name) and node.id == variable
