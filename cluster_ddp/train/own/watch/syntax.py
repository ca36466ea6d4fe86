"""Reads the source of a running program: which loops run, and how they set and use their variables."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import re
import sysconfig
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from cluster_ddp.train.own.kept import Kept
from cluster_ddp.train.own.program import once, running_frames, variables_of
from cluster_ddp.train.state.surroundings import INSTALLED, is_of_user

_Found = TypeVar("_Found")
_STANDARD = sysconfig.get_path("stdlib")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
_FIRST = re.compile(r"None|-?[\d.e+-]+|-?(float\(.*\)|\w+\.(inf|Inf|infty|maxsize))|(torch\.)?tensor\(-?[\d.e+-]+.*\)")
_UPDATING = re.compile(r"clip_grad_(norm|value)_$|\.data\.\w+_$|(sch|plateau|lr)\w*\.step$", re.IGNORECASE)
_RESTORED = re.compile(r"\b(param_groups|_?run_?|kept|get_last_lr|keep)\b")
_TIMES = re.compile(r"(\b|_)(time|now|utcnow|perf_counter|monotonic)(_ns)?\b")


class Text(NamedTuple):
    """The syntax tree of a running function, without those of functions nested in it."""

    parents: dict[ast.AST, ast.AST]
    loops: list[ast.For | ast.While]  # those being executed, outermost first


class Feeding(NamedTuple):
    """What the loss of a loop is computed from."""

    statements: set[ast.AST]
    names: set[str]  # the variables and attributes that these read


def text_of(frame: FrameType) -> Text:
    """The running function.

    Raises
    ------
    SyntaxError
        Its source cannot be read, or its lines have moved.
    """
    return once((frame.f_code.co_filename, frame.f_code, frame.f_lineno), lambda: _text_of(frame))


def in_running(find: Callable[[Text, FrameType], Iterable[_Found]]) -> Iterator[_Found]:
    """What is found in the source of the running functions of the program; nothing in one where that fails."""
    for frame in running_frames():
        if not is_of_library(frame.f_code.co_filename):
            with contextlib.suppress(Exception):  # there is no source, or its lines have moved
                yield from find(text_of(frame), frame)


def _text_of(frame: FrameType) -> Text:
    scope: ast.AST = _parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    running = [scope]
    for node in running:  # it grows, and the innermost comes last
        inner = ast.iter_child_nodes(node)
        running += [child for child in inner if not hasattr(child, "lineno") or _is_in(child, frame)]
        if isinstance(node, FUNCTIONS):
            scope = node
    parents = with_parents(scope)
    loops = [node for node in parents if isinstance(node, (ast.For, ast.While)) and _is_in(node, frame)]
    return Text(parents, loops)


def program_files(objects: Iterable[Any]) -> set[str]:
    """The files of the running functions, and of the classes of these objects, without those of libraries."""
    kinds = {kind for value in objects for kind in type(value).__mro__ if is_own_class(kind)}
    code = [getattr(member, "__code__", None) for kind in kinds for member in vars(kind).values()]
    files = {at.co_filename for at in (*code, *(frame.f_code for frame in running_frames())) if at is not None}
    return {file for file in files if not is_of_library(file)}


def read_once(find: Callable[..., Iterator[_Found]]) -> Callable[..., tuple[_Found, ...]]:
    """Let what a function finds in a file's source be found only once, and not after each step that is looked at."""
    return functools.lru_cache(maxsize=100)(lambda *arguments: tuple(find(*arguments)))


def source_of(file: str) -> str:
    """The source in a file; empty if it cannot be read."""
    return "".join(linecache.getlines(file))


def tree_of(source: str) -> ast.Module:
    """The syntax tree of a source; empty if it is no Python."""
    try:
        return _parsed(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _parsed(source: str) -> ast.Module:
    return once((ast.parse, source), lambda: ast.parse(source))


def tree_of_object(value: Any) -> ast.Module:
    """The syntax tree of a class or function; empty if there is no source of it."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(value)))
    except Exception:
        return ast.Module([], [])


def is_of_library(file: str) -> bool:
    """Whether a file of source is of Python itself or installed, for this environment or another, as for a user."""
    return file.startswith(_STANDARD) or not set(INSTALLED).isdisjoint(PurePath(file).parts)


def is_own_class(kind: type) -> bool:
    """Whether a class is the program's, and not one of a library or of this package."""
    return is_of_user(kind.__module__)


def is_early_stopper(value: Any) -> bool:
    """Whether this is an object of the program's own class for early stopping, as most programs have one."""
    return "earlystop" in type(value).__name__.lower().replace("_", "") and is_own_class(type(value))


def with_parents(scope: ast.AST) -> dict[ast.AST, ast.AST]:
    """The nodes of a scope, without nested scopes, each with its parent; outermost first."""
    return once(scope, lambda: dict(_parents(scope)))


def _is_in(node: Any, frame: FrameType) -> bool:
    return node.lineno <= frame.f_lineno <= (node.end_lineno or 0)  # type: ignore[no-any-return]


def _parents(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    todo = [scope]
    while todo:
        parent = todo.pop(0)
        for child in ast.iter_child_nodes(parent):
            yield child, parent
            if not isinstance(child, SCOPES):
                todo.append(child)


def statement_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.stmt:
    """The innermost statement around an expression."""
    return next(around for around in nodes_around(node, parents) if isinstance(around, ast.stmt))


def nodes_around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (parent := parents.get(node)) is not None:
        yield parent
        node = parent


def below(loop: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    return (node for node in parents if loop in nodes_around(node, parents))


def feeding_loss(text: Text) -> Feeding:
    """The statements of the running loops that compute the loss, on which they call ``backward()``, or the update."""
    inside = list(below(text.loops[0], text.parents))
    setting = [node for node in inside if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    over_weights = [node for node in inside if isinstance(node, ast.For) and "parameters(" in ast.unparse(node.iter)]
    weights = {name for node in over_weights for name in assigned(node)}
    statements = [node for node in inside if isinstance(node, ast.stmt)]
    todo: list[ast.AST] = [
        node for node in statements if _updates(node, weights) or sets_rate_of_optimizer(node, text.parents)
    ]
    found = Feeding(set(), set())
    while todo:
        statement = todo.pop()
        found.statements.add(statement)
        value = getattr(statement, "value", None) or statement
        found.names.update(name for part in ast.walk(value) if (name := name_of(part)) is not None)
        todo += [
            node for node in setting if node not in found.statements and (assigned(node) | added_to(node)) & found.names
        ]
    return found


def changed_in_place_after_use(name: str, text: Text, using: Container[ast.AST]) -> bool:
    """Whether a running loop uses a tensor or an array in one of these statements before it changes it in place.

    A statement that only calls a function on it, or with it, may change it.
    """
    for loop in text.loops:
        uses = sorted(
            (node for node in below(loop, text.parents) if name_of(node) == name),
            key=lambda node: (node.lineno, node.col_offset),  # type: ignore[attr-defined]
        )
        statements = [statement_of(use, text.parents) for use in uses]
        changing = [_changes_in_place(statement, name) for statement in statements]
        if any(changing) and (isinstance(statements[0], ast.AugAssign) or (statements[0] in using and not changing[0])):
            return True
    return False


def _changes_in_place(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.Expr):
        return not _goes_backward(statement.value)
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    parts = (part for target in targets if target is not None for part in ast.walk(target))
    return isinstance(statement, (ast.Assign, ast.AugAssign)) and any(is_read(part, name) for part in parts)


def added_to(node: ast.AST) -> set[str]:
    """What this adds an item to, by ``weights.append(...)``, or sets one of, by ``weights[epoch, 0] = ...``."""
    call = getattr(node, "value", None)
    if isinstance(node, ast.Expr) and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        items = [call.func.value] if call.func.attr == "append" else []
    else:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        items = [to.value for to in targets if isinstance(to, ast.Subscript) and name_of(to) is None]
    return {name for item in items if (name := name_of(item)) is not None}


def reset_each_time(text: Text) -> dict[str, bool]:
    """The objects that the running loops reset each time, and whether by a seed, as ``env.reset(seed=step)`` does."""
    loop = text.loops[-1]
    at_times = {node for node in below(loop, text.parents) if isinstance(node, ast.If)}
    calls = [node for node in below(loop, text.parents) if isinstance(node, ast.Call)]
    return {
        name: any(argument.arg == "seed" for argument in call.keywords)
        for call in calls
        if at_times.isdisjoint(nodes_around(call, text.parents))
        and (name_of(call.func) or "").endswith(".reset")
        and (name := name_of(call.func.value)) is not None  # type: ignore[attr-defined]
    }


def _updates(statement: ast.stmt, weights: set[str]) -> bool:
    """Whether this calls ``backward()``, clips gradients, steps a scheduler, or changes weights (``p.mul_(mask)``)."""
    call = getattr(statement, "value", None)
    name = (name_of(call.func) or "") if isinstance(call, ast.Call) else ""
    if isinstance(statement, ast.Expr) and (_goes_backward(call) or (name[-1:] == "_" and _is_of(name, weights))):
        return True
    return _UPDATING.search(name) is not None or any(_is_of(to, weights) for to in assigned(statement))


def _is_of(name: str, weights: set[str]) -> bool:
    """Whether this is an attribute of one of these variables."""
    return name.partition(".")[0] in weights and "." in name


def _goes_backward(call: ast.AST | None) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.endswith("backward")


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


def value_of(name: str, frame: FrameType) -> Any:
    """What a running function has under the name of a variable or an attribute."""
    first, *inner = name.split(".")
    return functools.reduce(getattr, inner, {**frame.f_globals, **variables_of(frame)}[first])


def value_or_none(name: str, frame: FrameType) -> Any:
    """The same; None if it is neither a variable nor an attribute, or set only later."""
    with contextlib.suppress(Exception):
        return value_of(name, frame)
    return None


def is_saved(name: str, frame: FrameType, passed_in: Iterable[Any]) -> bool:
    """Whether this is an attribute of an object whose attributes are saved, or may be."""
    owner = name.rpartition(".")[0]
    found = value_of(owner, frame) if owner else None
    return isinstance(found, (Kept, nn.Module)) or (bool(owner) and any(found is thing for thing in passed_in))


def is_held(name: str) -> bool:
    """Whether this is the name of an attribute or item, and not of a variable."""
    return "." in name or "[" in name


def holder_of(name: str) -> str | None:
    """The dict that holds this item; None for a variable or an attribute."""
    holder, _, key = name.partition("[")
    return holder if key else None


def is_gradient(name: str) -> bool:
    """Whether this is the gradient of a weight, which the loop may replace by a mean over the ranks, say."""
    return name.endswith(".grad")


def last_part(name: str) -> str:
    """The name under which to keep it: that of the attribute, or of the dict that holds the item."""
    return name.partition("[")[0].rpartition(".")[2]


def assigned(node: ast.AST) -> set[str]:
    """The variables that this node assigns."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if targets == [None]:
        return set()  # most nodes are no assignment
    parts = (part for target in targets for part in ast.walk(target))
    return {name for part in parts if (name := name_of(part)) is not None and isinstance(part.ctx, ast.Store)}  # type: ignore[attr-defined]


def is_read(node: ast.AST, name: str) -> bool:
    return name_of(node) == name and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]


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


def taken_from(node: ast.AST) -> set[str]:
    """The iterator of which this takes the next item, as ``next(tasks)``."""
    if not (isinstance(node, ast.Call) and name_of(node.func) == "next" and node.args):
        return set()
    name = name_of(node.args[0])
    return set() if name is None else {name}


def is_restored(node: ast.AST) -> bool:
    """Whether a statement sets something from run.step, run.keep or the optimizer's rate."""
    return _RESTORED.search(ast.unparse(node)) is not None


def sets_rate(statement: ast.AST) -> bool:
    """Whether this sets a learning rate, as ``group["lr"] = lr`` does."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return any(isinstance(to, ast.Subscript) and ast.unparse(to.slice) == "'lr'" for to in targets)


def sets_rate_of_optimizer(statement: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this sets a learning rate in the groups of an optimizer, and not one that is only logged."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    loops = [node.iter for node in nodes_around(statement, parents) if isinstance(node, ast.For)]
    return sets_rate(statement) and any("param_groups" in ast.unparse(part) for part in (*targets, *loops))


def is_of_clock(node: ast.AST) -> bool:
    """Whether this assigns a time, as for logging once a minute."""
    value = getattr(node, "value", None)
    return value is not None and _TIMES.search(ast.unparse(value)) is not None
