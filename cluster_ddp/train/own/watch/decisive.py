"""Whether what a loop does depends on how its source uses a number."""

from __future__ import annotations

import ast
import re

from cluster_ddp.train.own.watch.syntax import assigned, nodes_around, sets_rate, statement_of

_OF_RATES = {"lr", "rate", "scheduler", "sched", "ema"}


def is_decay(node: ast.AST) -> bool:
    """Whether this is a step of a schedule, as ``temperature *= 0.9``."""
    return isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div))


def is_rate(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this use sets a learning rate, as in ``group["lr"] = lr``."""
    statement = next((around for around in nodes_around(use, parents) if isinstance(around, ast.stmt)), None)
    return statement is not None and sets_rate(statement)


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
