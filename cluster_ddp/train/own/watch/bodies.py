"""What a program runs again and again: its running functions, the loops in them, and the source of its classes."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from cluster_ddp.train.objects.syntax import FUNCTIONS, SCOPES
from cluster_ddp.train.objects.whose_code import is_library_file, is_own_class
from cluster_ddp.train.own.program import once, running_frames, variables_of

_Found = TypeVar("_Found")


class Text(NamedTuple):
    """The syntax tree of a running function, without those of functions nested in it."""

    parents: dict[ast.AST, ast.AST]
    loops: list[ast.For | ast.While]  # those being executed, outermost first


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
        if not is_library_file(frame.f_code.co_filename):
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
    return {file for file in files if not is_library_file(file)}


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


def value_of(name: str, frame: FrameType) -> Any:
    """What a running function has under the name of a variable, an attribute or an item of a dict."""
    holder, _, key = name.partition("[")
    first, *inner = holder.split(".")
    found = functools.reduce(getattr, inner, {**frame.f_globals, **variables_of(frame)}[first])
    return found[ast.literal_eval(key.removesuffix("]"))] if key else found


def value_or_none(name: str, frame: FrameType) -> Any:
    """The same; None if there is none, or it is set only later."""
    with contextlib.suppress(Exception):
        return value_of(name, frame)
    return None
