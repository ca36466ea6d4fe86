"""Reads single nodes of a program's syntax tree: what they name, set, read and count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
_FIRST = re.compile(r"None|-?[\d.e+-]+|-?(float\(.*\)|\w+\.(inf|Inf|infty|maxsize))|(torch\.)?tensor\(-?[\d.e+-]+.*\)")
_TIMES = re.compile(r"(\b|_)(time|now|utcnow|perf_counter|monotonic)(_ns)?\b")

_ADDING = {"append", "appendleft", "extend", "insert"}
_ADDING_TO_FIRST = {"heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"}


def nodes_around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (parent := parents.get(node)) is not None:
        yield parent
        node = parent


def statement_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.stmt:
    """The innermost statement around an expression."""
    return next(around for around in nodes_around(node, parents) if isinstance(around, ast.stmt))


def below(loop: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    return (node for node in parents if loop in nodes_around(node, parents))


def name_of(node: ast.AST) -> str | None:
    """The name of a variable, attribute or item, such as ``self.step`` or ``best['loss']``; None for any other node."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or (inner := name_of(node.value)) is None:
        return None
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}"
    is_item = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) and "[" not in inner
    return f"{inner}[{ast.unparse(node.slice)}]" if is_item else None


def is_held(name: str) -> bool:
    """Whether this is the name of an attribute or item, and not of a variable."""
    return "." in name or "[" in name


def holder_of(name: str) -> str | None:
    """The dict that holds this item; None for a variable or an attribute."""
    holder, _, key = name.partition("[")
    return holder if key else None


def name_to_keep(name: str) -> str:
    """The name under which to keep it: that of the attribute, or of the dict that holds the item."""
    return name.partition("[")[0].rpartition(".")[2]


def is_gradient(name: str) -> bool:
    """Whether this is the gradient of a weight, which the loop may replace by a mean over the ranks, say."""
    return name.endswith(".grad")


def assigned(node: ast.AST) -> set[str]:
    """The variables that this node assigns."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if targets == [None]:
        return set()  # most nodes are no assignment
    parts = (part for target in targets for part in ast.walk(target))
    return {name for part in parts if (name := name_of(part)) is not None and isinstance(part.ctx, ast.Store)}  # type: ignore[attr-defined]


def added_to(node: ast.AST) -> set[str]:
    """What this adds an item to, by ``weights.append(...)``, or sets one of, by ``weights[epoch, 0] = ...``.

    ``heapq.heappush(weights, ...)`` and ``bisect.insort(weights, ...)`` count, too.
    """
    call = getattr(node, "value", None)
    if isinstance(node, ast.Expr) and isinstance(call, ast.Call):
        adds = isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING
        items = [call.func.value] if adds else []  # type: ignore[attr-defined]
        if (name_of(call.func) or "").rpartition(".")[2] in _ADDING_TO_FIRST:
            items = call.args[:1]
    else:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        items = [to.value for to in targets if isinstance(to, ast.Subscript) and name_of(to) is None]
    return {name for item in items if (name := name_of(item)) is not None}


def taken_from(node: ast.AST) -> set[str]:
    """The iterator of which this takes the next item, as ``next(tasks)``."""
    if not (isinstance(node, ast.Call) and name_of(node.func) == "next" and node.args):
        return set()
    name = name_of(node.args[0])
    return set() if name is None else {name}


def is_read(node: ast.AST, name: str) -> bool:
    return name_of(node) == name and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]


def built_on_itself(node: ast.AST) -> set[str]:
    """What this sets to a value computed from the previous one, or fills with items computed from earlier ones."""
    names = set() if isinstance(node, ast.Expr) else assigned(node) | added_to(node)
    if isinstance(node, ast.AugAssign):
        return names
    value = getattr(node, "value", None)
    return {name for name in names if value is not None and any(is_read(part, name) for part in ast.walk(value))}


def counted(node: ast.AST) -> str | None:
    """The variable that this node increments."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_number(node):
        return name_of(node.target)
    return None


def _is_number(node: ast.AST) -> bool:
    """Whether this assigns an integer literal."""
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and type(value.value) is int


def begins_with_number(node: ast.AST, name: str | None = None) -> bool:
    """Whether this assigns a literal number, infinity, or None; with `name`, whether it does to this variable."""
    value = getattr(node, "value", None)
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    named = [part for to in getattr(node, "targets", []) for part in getattr(to, "elts", [to])]
    if name is not None and len(named) == len(parts):
        parts = [part for to, part in zip(named, parts, strict=True) if name_of(to) == name]
    return all(part is not None and bool(_FIRST.fullmatch(ast.unparse(part))) for part in parts)


def is_of_clock(node: ast.AST) -> bool:
    """Whether this assigns a time, as for logging once a minute."""
    value = getattr(node, "value", None)
    return value is not None and _TIMES.search(ast.unparse(value)) is not None
