"""Detects numbers that control a custom loop and that no checkpoint contains: batch counts, best values, patience."""

from __future__ import annotations

import ast
import contextlib
import itertools
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from cluster_ddp.train.own.kept import Kept, KeptValues
from cluster_ddp.train.own.program import (
    found_or_nothing,
    reachable,
    running_frames,
    running_variables,
    variables_of,
)

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_FIRST = re.compile(r"None|-?[\d.e+-]+|-?(float\(.*\)|\w+\.(inf|Inf|infty|maxsize))")
_TIMES = re.compile("time|now|perf_counter", re.IGNORECASE)
_OF_EPOCH = re.compile(r"epoch|\blen\(")
_COPIES = re.compile(r"\b(state_dict|deepcopy)\(")
_OF_RATES = {"lr", "rate", "scheduler", "sched", "ema"}


class Counts:
    """Warns, after the second step, about numbers on which a loop depends and that start over after a resume.

    First, ``step += 1`` that ends the loop or sets its learning rate, as in ``if step >= max_steps: break``. Then other
    numbers that a batch or an epoch takes over from the previous one and compares, such as the best accuracy so far and
    the epochs since, and the best weights so far. Last, the program's own objects for early stopping. The source of the
    running functions shows whether a number is compared or goes into an assignment. Numbers that are only printed,
    logged, or used every n steps (``step % 100``) are not reported, nor are those of a generator that only passes the
    batches on.

    Parameters
    ----------
    warn
        Called with the message.
    passed_in
        The objects passed in; their attributes are not checked.
    kept
        What the loop keeps with `ScriptRun.keep`.
    """

    def __init__(
        self, warn: Callable[[str], None], passed_in: Iterable[Any] = (), kept: KeptValues | None = None
    ) -> None:
        self._warn, self._passed_in, self._kept = warn, list(passed_in), KeptValues() if kept is None else kept

    def first(self) -> None:
        """Does nothing: the source is checked after the second step."""

    def second(self) -> None:
        """Call after the second step."""
        counts: set[str] = set()
        carried: set[str] = set()
        for frame in running_frames():
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                with contextlib.suppress(Exception):  # there is no source, or its lines have moved
                    if (text := _text_of(frame)) is not None:
                        counts |= {name for name in _counts_in(text) if self._is_unkept(name, frame)}
                        carried |= {name for name in _carried_in(text) if self._is_unkept(name, frame)}
                        carried |= {name for name in _best_weights_in(text) if self._is_own(name, frame)}
        if counts:
            first = _last(min(counts))
            self._warn(
                f"the loop counts its batches in {', '.join(sorted(counts))}, and uses that count: after a resume it "
                "starts counting again, so no limit or learning rate based on it is exact. Use run.step, the number "
                f"of finished steps, or keep it: kept = run.keep({first}=0), and kept.{first} += 1 in the loop"
            )
        if carried := carried - counts:
            first = min(map(_last, carried))
            begun = ", ".join(f"{name}=..." for name in sorted(set(map(_last, carried))))
            self._warn(
                f"the loop depends on {', '.join(sorted(carried))}, which no checkpoint contains: a resume restarts "
                "from the initial value, and stops or saves a best model at a different step. Keep it: kept = "
                f"run.keep({begun}) with the initial values, and read and set kept.{first} in the loop"
            )
        for kind, name in sorted({(type(found).__name__, _last(name)) for name, found in _early_stoppers()}):
            self._warn(
                f"{name} is an {kind} without state_dict(), so no checkpoint contains what it counts: after a resume "
                "it starts counting again, and training ends in a different epoch. Give it state_dict(), which returns "
                f"its numbers in a dict, and load_state_dict(), which restores them, and pass it in ({name}={name})"
            )

    def _is_unkept(self, name: str, frame: FrameType) -> bool:
        """Whether it is now a number, in a variable or an attribute of an object that is not saved otherwise."""
        holder, _, key = name.partition("[")
        found = _value_of(holder, frame)
        if key:
            if any(found is value for value in self._kept.values.values()):
                return False
            found = found[ast.literal_eval(key.removesuffix("]"))]
        is_number = found is None or isinstance(found, (int, float)) or (torch.is_tensor(found) and found.dim() == 0)
        return is_number and self._is_own(holder, frame)

    def _is_own(self, name: str, frame: FrameType) -> bool:
        """Whether it is a variable, or an attribute of an object that is not saved otherwise."""
        owner = name.rpartition(".")[0]
        found = _value_of(owner, frame) if owner else None
        return not isinstance(found, (Kept, nn.Module)) and not any(
            found is thing for thing in self._passed_in if owner
        )


def _value_of(name: str, frame: FrameType) -> Any:
    first, *inner = name.split(".")
    return reduce(getattr, inner, {**frame.f_globals, **variables_of(frame)}[first])


def _early_stoppers() -> Iterator[tuple[str, Any]]:
    """Early stopping objects of the program's own classes, which most programs write themselves."""
    for name, found in found_or_nothing(reachable(running_variables(), 2)):
        kind = type(found)
        if "earlystop" not in kind.__name__.lower().replace("_", "") or callable(getattr(found, "state_dict", None)):
            continue
        if not (getattr(sys.modules.get(kind.__module__), "__file__", None) or "").startswith(_LIBRARIES):
            yield name, found


class _Text(NamedTuple):
    """The syntax tree of a running function, without those of functions nested in it."""

    parents: dict[ast.AST, ast.AST]
    loops: list[ast.For]  # those being executed, outermost first


def _text_of(frame: FrameType) -> _Text | None:
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    scope: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_in(node, frame):
            scope = node  # the innermost comes last
    parents = dict(_parents(scope))
    loops = [node for node in parents if isinstance(node, ast.For) and _is_in(node, frame)]
    return _Text(parents, loops) if loops and not _only_passes_on(loops[0], parents) else None


def _only_passes_on(loop: ast.For, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a generator yields each batch as it is, as those do that time and print: no count changes its batches."""
    inside = list(_below(loop, parents))
    yields = [node for node in inside if isinstance(node, ast.Yield)]
    batch = ast.unparse(loop.target)
    return (
        bool(yields)
        and all(node.value is not None and ast.unparse(node.value) == batch for node in yields)
        and not any(isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise)) for node in inside)
    )


def _counts_in(text: _Text) -> Iterator[str]:
    parents, inner, outer = text.parents, text.loops[-1], text.loops[0]
    for name in {target for node in _below(inner, parents) if (target := _counted(node)) is not None}:
        others = [node for node in parents if name in _assigned(node) and _counted(node) is None]
        if not (others or _is_held(name)) or not all(
            _begins_with_number(node) or _begins_epoch(node) for node in others
        ):
            continue  # not a local variable, or its initial value may be the position
        if any(_holder_of(name) in _assigned(node) for node in _below(outer, parents)):
            continue  # in a dict that is made in each epoch
        if any(inner in _around(node, parents) for node in others):
            continue  # counts within a batch
        is_of_epoch = any(outer in _around(node, parents) for node in others if not _begins_epoch(node))
        uses = (node for node in _below(outer, parents) if _is_read(node, name))
        if any(_is_decisive(node, name, parents, is_of_epoch=is_of_epoch) for node in uses):
            yield name


def _carried_in(text: _Text) -> Iterator[str]:
    """Variables that start as a number, are carried from one pass through a loop to the next, and are compared."""
    parents, outer = text.parents, text.loops[0]
    shared = {name for node in parents if isinstance(node, ast.Global) for name in node.names}
    assigning = {node: names for node in parents if (names := _assigned(node))}
    for loop in text.loops:
        inside = {node: names for node, names in assigning.items() if loop in _around(node, parents)}
        for name in sorted({name for names in inside.values() for name in names}):
            before = [node for node, names in assigning.items() if name in names and node not in inside]
            if not (_is_held(name) or name in shared or any(map(_begins_with_number, before))):
                continue  # not a number that starts over: a parameter, or a value from run.keep
            if any(_holder_of(name) in names for names in inside.values()):
                continue  # in a dict that is made in each pass
            if any(_is_of_clock(node) for node, names in inside.items() if name in names):
                continue
            if _is_read_first(loop.body, name):
                uses = (node for node in _below(outer, parents) if _is_read(node, name))
                if any(_is_decisive(node, name, parents, is_of_epoch=True) for node in uses):
                    yield name


def _best_weights_in(text: _Text) -> Iterator[str]:
    """Variables that some epochs set to a copy of the weights, and that are read after the loop."""
    outer = text.loops[0]
    read = {_name(node) for node in text.parents if getattr(node, "lineno", 0) > (outer.end_lineno or 0)}
    for node in _below(outer, text.parents):
        if isinstance(node, ast.Assign) and _COPIES.search(ast.unparse(node.value)):
            inside = itertools.takewhile(lambda around: around is not outer, _around(node, text.parents))
            if any(isinstance(around, ast.If) for around in inside):
                yield from (name for name in _assigned(node) if name in read and "[" not in name)


def _is_of_clock(node: ast.AST) -> bool:
    """Whether this assigns a time, as for logging once a minute."""
    value = getattr(node, "value", None)
    return value is not None and _TIMES.search(ast.unparse(value)) is not None


def _is_read_first(body: Sequence[ast.stmt], name: str) -> bool | None:
    """Whether some path through these statements reads `name` before setting it; None if every path sets it first."""
    for statement in body:
        if isinstance(statement, _SCOPES):
            continue
        parts = list(ast.iter_child_nodes(statement))
        inner = [part for part in parts if isinstance(part, (ast.stmt, ast.excepthandler))]
        own = [part for part in parts if part not in inner] if inner else [statement]
        if any(_reads(part, name) for part in own):
            return True
        if any(name in _stored(part) for part in own):
            return None
        blocks = [getattr(statement, block, []) for block in ("body", "orelse", "finalbody")]
        blocks += [part.body for part in inner if isinstance(part, ast.ExceptHandler)]
        ways = [_is_read_first(block, name) for block in blocks if block]
        if True in ways:
            return True
        is_run = isinstance(statement, ast.With) or (isinstance(statement, ast.If) and statement.orelse)
        if is_run and all(way is None for way in ways):
            return None
    return False


def _reads(part: ast.AST, name: str) -> bool:
    return any(
        _is_read(node, name) or (isinstance(node, ast.AugAssign) and name in _assigned(node)) for node in ast.walk(part)
    )


def _stored(part: ast.AST) -> set[str]:
    return {found for node in ast.walk(part) if (found := _name(node)) and isinstance(node.ctx, ast.Store)}  # type: ignore[attr-defined]


def _is_in(node: ast.For | ast.FunctionDef | ast.AsyncFunctionDef, frame: FrameType) -> bool:
    return node.lineno <= frame.f_lineno <= (node.end_lineno or 0)


def _parents(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The nodes of a scope, without nested scopes, each with its parent; outermost first."""
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
    """The variable that this node increments."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _is_number(node):
        return _name(node.target)
    return None


def _is_number(node: ast.AST) -> bool:
    """Whether this assigns an integer literal."""
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and type(value.value) is int


def _assigned(node: ast.AST) -> set[str]:
    """The variables that this node assigns."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    parts = (part for target in targets if target is not None for part in ast.walk(target))
    return {name for part in parts if (name := _name(part)) is not None and isinstance(part.ctx, ast.Store)}  # type: ignore[attr-defined]


def _name(node: ast.AST) -> str | None:
    """The name of a variable, attribute or item, such as ``self.step`` or ``best['loss']``; None for any other node."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or (inner := _name(node.value)) is None:
        return None
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}"
    is_item = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str) and "[" not in inner
    return f"{inner}[{ast.unparse(node.slice)}]" if is_item else None


def _is_held(name: str) -> bool:
    """Whether this is the name of an attribute or item, and not of a variable."""
    return "." in name or "[" in name


def _holder_of(name: str) -> str | None:
    """The dict that holds this item; None for a variable or an attribute."""
    holder, _, key = name.partition("[")
    return holder if key else None


def _last(name: str) -> str:
    """The name under which to keep it: that of the attribute, or of the dict that holds the item."""
    return name.partition("[")[0].rpartition(".")[2]


def _begins_with_number(node: ast.AST) -> bool:
    """Whether this assigns a literal number, infinity, or None."""
    value = getattr(node, "value", None)
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return all(part is not None and bool(_FIRST.fullmatch(ast.unparse(part))) for part in parts)


def _begins_epoch(node: ast.AST) -> bool:
    """Whether this assigns the number of batches before the epoch, as in ``num_updates = epoch * len(loader)``."""
    value = getattr(node, "value", None)
    text = ast.unparse(value) if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) else ""
    return _OF_EPOCH.search(text) is not None and ".step" not in text


def _is_read(node: ast.AST, name: str) -> bool:
    return _name(node) == name and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]


def _is_decisive(use: ast.AST, name: str, parents: dict[ast.AST, ast.AST], *, is_of_epoch: bool) -> bool:
    """Whether the loop's behavior depends on this use of a count; `is_of_epoch`: it restarts in each epoch."""
    for around in _around(use, parents):
        if isinstance(around, ast.FormattedValue):
            return False
        if isinstance(around, ast.BinOp) and isinstance(around.op, ast.Mod) and around.left is use:
            return False
        if isinstance(around, ast.Compare):
            return True
        if isinstance(around, ast.Expr):  # on a count within the epoch, too
            call = around.value
            words = re.split(r"[._]", ast.unparse(call.func).lower()) if isinstance(call, ast.Call) else []
            return not _OF_RATES.isdisjoint(words)
        if isinstance(around, ast.stmt):
            return not is_of_epoch and isinstance(around, (ast.Assign, ast.AugAssign)) and name not in _assigned(around)
    return False
