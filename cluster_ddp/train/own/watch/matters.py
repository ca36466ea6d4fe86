"""What matters to a training: the loss, the update, a learning rate, the end of a loop, what decides a best model."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from typing import NamedTuple

from cluster_ddp.train.objects.syntax import (
    FunctionNode,
    added_to,
    assigned,
    begins_with_number,
    below,
    built_on_itself,
    is_of_clock,
    is_read,
    name_of,
    nodes_around,
    statement_of,
)
from cluster_ddp.train.own.watch.bodies import Text

_UPDATING = re.compile(r"clip_grad_(norm|value)_$|\.data\.\w+_$|(sch|plateau|lr)\w*\.step$", re.IGNORECASE)
_BOUNDS = {"min", "max"}
_FORMULAS = {"exp", "pow", "cos", *_BOUNDS}
_SHOWS = re.compile(r"(\b|_)(print|log|logger|logging|info|debug|write|show|add_scalars?)(\b|_)")
_OF_RATES = {"lr", "rate", "scheduler", "sched", "ema"}


class Feeding(NamedTuple):
    """What the loss of a loop is computed from."""

    statements: set[ast.AST]
    names: set[str]  # the variables and attributes that these read


def feeding_loss(text: Text) -> Feeding:
    """The statements of the running loops that compute the loss, on which they call ``backward()``, or the update."""
    inside = list(below(text.loops[0], text.parents))
    setting = [node for node in inside if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    over_weights = [node for node in inside if isinstance(node, ast.For) and "parameters(" in ast.unparse(node.iter)]
    weights = {name for node in over_weights for name in assigned(node)}
    statements = [node for node in inside if isinstance(node, ast.stmt)]
    todo: list[ast.AST] = [
        node for node in statements if updates_weights(node, weights) or sets_rate_of_optimizer(node, text.parents)
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


def updates_weights(statement: ast.stmt, weights: set[str]) -> bool:
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


def sets_rate(statement: ast.AST) -> bool:
    """Whether this sets a learning rate, as ``group["lr"] = lr`` does."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return any(isinstance(to, ast.Subscript) and ast.unparse(to.slice) == "'lr'" for to in targets)


def sets_rate_of_optimizer(statement: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this sets a learning rate in the groups of an optimizer, and not one that is only logged."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    loops = [node.iter for node in nodes_around(statement, parents) if isinstance(node, ast.For)]
    return sets_rate(statement) and any("param_groups" in ast.unparse(part) for part in (*targets, *loops))


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


def is_decay(node: ast.AST) -> bool:
    """Whether this is a step of a schedule, as ``temperature *= 0.9``."""
    return isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div))


def is_decisive(use: ast.AST, name: str, parents: dict[ast.AST, ast.AST], *, is_of_epoch: bool) -> bool:
    """Whether the loop's behavior depends on this use of a count; `is_of_epoch`: it restarts in each epoch."""
    for around in nodes_around(use, parents):
        if isinstance(around, ast.FormattedValue):
            return False
        if isinstance(around, ast.BinOp) and isinstance(around.op, ast.Mod) and around.left is use:
            return False
        if isinstance(around, ast.Compare):
            statement = statement_of(around, parents)
            return not (isinstance(statement, ast.Assign) and assigned(statement) == {name})  # as a mean of its own
        if isinstance(around, ast.Expr):  # on a count within the epoch, too
            call = around.value
            words = re.split(r"[._]", ast.unparse(call.func).lower()) if isinstance(call, ast.Call) else []
            return not _OF_RATES.isdisjoint(words)
        if isinstance(around, ast.stmt):
            return not is_of_epoch and isinstance(around, (ast.Assign, ast.AugAssign)) and name not in assigned(around)
    return False


def compared_in(parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    """What is compared with something that is no literal, other than to print, or is in a formula such as of a decay.

    Such formulas are ``exp(-steps / 1000)``, ``0.99**steps`` and ``min(1.0, steps / 1000)``, but not a meter's mean.
    """
    for node in parents:
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            both = [node.left, *node.comparators]
            decides = not (any(isinstance(side, ast.Constant) for side in both) or only_shows(parents[node]))
            sides = list(both) if decides else []
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            sides = list(ast.walk(node))
        elif isinstance(node, ast.Call) and (called := (name_of(node.func) or "").rpartition(".")[2]) in _FORMULAS:
            sides = [part for argument in node.args for part in ast.walk(argument)]
            if called in _BOUNDS:
                sides = [part.left for part in sides if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div)]
        yield from (name for side in sides if (name := name_of(side)) is not None)


def only_shows(statement: ast.AST) -> bool:
    """Whether this is an ``if`` that only prints or logs, as every so many batches, and then counts from 0 again."""
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(
            begins_with_number(node)
            or is_of_clock(node)
            or (isinstance(node, ast.Expr) and _SHOWS.search(ast.unparse(node).partition("(")[0]) is not None)
            for node in statement.body
        )
    )


def rating_in(
    parents: dict[ast.AST, ast.AST], functions: dict[FunctionNode, dict[ast.AST, ast.AST]], *, gives: bool
) -> Iterator[str]:
    """What a function computes learning rates from that it sets, or `gives`, also in other functions of its scope."""
    values = list(parents) if gives else list(rates_in(parents))
    called = {name_of(part.func) for value in values for part in ast.walk(value) if isinstance(part, ast.Call)}
    own = (inner for function, inner in functions.items() if called & {function.name, f"self.{function.name}"})
    values += [node for inner in own for node in inner]
    parts = (part for value in values for part in ast.walk(value))
    yield from (name for part in parts if (name := name_of(part)) is not None and is_read(part, name))


def rates_in(parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """The expressions that a function sets learning rates to, and those that it sets variables in them to."""
    setting = [(node, node.value) for node in parents if assigned(node) and getattr(node, "value", None) is not None]  # type: ignore[attr-defined]
    rates = [value for node, value in setting if sets_rate(node)]
    names = {name_of(part) for value in rates for part in ast.walk(value)} - {None}
    yield from (*rates, *(value for node, value in setting if assigned(node) & names))


def is_best(node: ast.AST, name: str, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this sets a number to what it was compared with, as in ``if acc > best: best = acc``, or ``max()``."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and name_of(value.func) in ("max", "min"):
        return name in built_on_itself(node) and len(value.args) == 2
    if value is None or begins_with_number(node):
        return False
    new = {name_of(part) for part in ast.walk(value)} - {None}
    for around in nodes_around(node, parents):
        if isinstance(around, ast.If) and node not in around.orelse:
            for compare in (part for part in ast.walk(around.test) if isinstance(part, ast.Compare)):
                sides = [compare.left, *compare.comparators]
                if any(is_read(side, name) for side in sides) and any(name_of(side) in new for side in sides):
                    return True
    return False
