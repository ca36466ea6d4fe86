"""Sees a count of the batches in a variable of a custom loop by which the loop goes: it starts over."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sysconfig
from collections.abc import Callable, Iterator
from types import FrameType

from cluster_ddp.train.own.program import running_frames

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_OF_RATES = {"lr", "rate", "scheduler", "sched", "ema"}


class Counts:
    """Warns, after the second step, about ``step += 1`` by which a loop ends, or sets its learning rate.

    Such as ``if step >= max_steps: break``. It is seen in the text of the functions that run: what is compared, or goes
    into what is assigned. What is only printed, logged, or comes every so many steps (``step % 100``) is not reported.

    Parameters
    ----------
    warn
        Takes the message.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn

    def first(self) -> None:
        """Nothing is to be noted."""

    def second(self) -> None:
        """Call after the second step."""
        names: set[str] = set()
        for frame in running_frames():
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                with contextlib.suppress(Exception):  # where there is no text, or one in which lines have moved
                    names |= set(_counts_of(frame))
        if names:
            first = min(names)
            self._warn(
                f"the loop counts its batches in {', '.join(sorted(names))}, and uses that count: after a resume it "
                "starts counting again, so no limit or learning rate based on it is exact. Use run.step, the number "
                f"of finished steps, or keep it: kept = run.keep({first}=0), and kept.{first} += 1 in the loop"
            )


def _counts_of(frame: FrameType) -> Iterator[str]:
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_in(node, frame):
            scope = node  # the innermost comes last
    parents = dict(_parents(scope))
    loops = [node for node in parents if isinstance(node, ast.For) and _is_in(node, frame)]
    if not loops:
        return
    inner, outer = loops[-1], loops[0]
    for name in {target for node in _below(inner, parents) if (target := _counted(node)) is not None}:
        others = [node for node in parents if name in _assigned(node) and _counted(node) is None]
        if not others or not all(_is_number(node) for node in others):
            continue  # it is no local variable, or begins at what may be the place
        if any(inner in _around(node, parents) for node in others):
            continue  # it counts within a batch
        is_of_epoch = any(outer in _around(node, parents) for node in others)
        uses = (node for node in _below(outer, parents) if _is_read(node, name))
        if any(_is_decisive(node, name, parents, is_of_epoch=is_of_epoch) for node in uses):
            yield name


def _is_in(node: ast.For | ast.FunctionDef | ast.AsyncFunctionDef, frame: FrameType) -> bool:
    return node.lineno <= frame.f_lineno <= (node.end_lineno or 0)


def _parents(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What is in a scope, without other scopes in it, each with what it is a part of; from the outside."""
    todo = [scope]
    while todo:
        parent = todo.pop(0)
        for child in ast.iter_child_nodes(parent):
            yield child, parent
            if not isinstance(child, _SCOPES):
                todo.append(child)


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (parent := parents.get(node)) is not None:
        yield parent
        node = parent


def _below(loop: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    return (node for node in parents if loop in _around(node, parents))


def _counted(node: ast.AST) -> str | None:
    """The variable to which this adds one."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_number(node):
        return node.target.id if isinstance(node.target, ast.Name) else None
    return None


def _is_number(node: ast.AST) -> bool:
    """Whether this assigns a number that stands there."""
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and type(value.value) is int


def _assigned(node: ast.AST) -> set[str]:
    """The variables that this sets."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    parts = (part for target in targets if target is not None for part in ast.walk(target))
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _is_read(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _is_decisive(use: ast.AST, name: str, parents: dict[ast.AST, ast.AST], *, is_of_epoch: bool) -> bool:
    """Whether what the loop does depends on this use of a count, which is set anew in each epoch or not."""
    for around in _around(use, parents):
        if isinstance(around, ast.FormattedValue):
            return False
        if isinstance(around, ast.BinOp) and isinstance(around.op, ast.Mod) and around.left is use:
            return False
        if isinstance(around, ast.Compare):
            return True
        if isinstance(around, ast.Expr):
            call = around.value
            words = re.split(r"[._]", ast.unparse(call.func).lower()) if isinstance(call, ast.Call) else []
            return not is_of_epoch and not _OF_RATES.isdisjoint(words)
        if isinstance(around, ast.stmt):
            return not is_of_epoch and isinstance(around, (ast.Assign, ast.AugAssign)) and name not in _assigned(around)
    return False
