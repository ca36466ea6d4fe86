"""Recognizes numbers and strings that steps change, but by which no step can depend on an earlier one.

The program sets them each time before it reads them, such as a rate that each step computes from a count; or only
warnings of a library depend on them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from cluster_ddp.train.objects.only_written import codes_of
from cluster_ddp.train.objects.syntax import FUNCTIONS
from cluster_ddp.train.objects.whose_code import is_of_user
from cluster_ddp.train.state.set_before_read import reads_before_setting, trees_with
from cluster_ddp.train.task import Task

_LATER = (ast.Lambda, ast.GeneratorExp)  # what is computed at another time
_WAITING = (ast.Yield, ast.YieldFrom, ast.Await)
_OF_ALL = {"vars", "asdict", "astuple"}


def is_unread(holder: object, key: str) -> bool:
    """Whether no step reads what an earlier one has left in an attribute that holds a number or a string."""
    kind: type = type(holder)
    return is_set_first(kind, key) or _is_count_of_updates(holder, key)


def _is_count_of_updates(holder: object, key: str) -> bool:
    """Whether a metric of torchmetrics only warns by this: means over updates are weighed by how many there were."""
    if key != "_update_count" or not any(kind.__module__ == "torchmetrics.metric" for kind in type(holder).__mro__):
        return False
    reductions = getattr(holder, "_reductions", None)
    if reductions is None or any(getattr(how, "__name__", "") == "dim_zero_mean" for how in reductions.values()):
        return False
    return not _may_ask_for_count()


@functools.cache
def _may_ask_for_count() -> bool:
    """Whether the program mentions how often a metric was updated."""
    names = ("update_count", "update_called")
    nodes = (node for name in names for tree in trees_with(name) for node in ast.walk(tree))
    return any(getattr(node, "attr", getattr(node, "value", None)) in names for node in nodes)


@functools.lru_cache(maxsize=1000)
def is_set_first(kind: type, key: str) -> bool:
    """Whether each method that reads `self.key` of such objects has set it before, and nothing else reads it."""
    if any(key in names for base in kind.__mro__ for names in _names_in_unseen_code(base)):
        return False
    nodes = [node for tree in trees_with(key) for node in ast.walk(tree)]
    if any(_may_read_all(node, kind, key) for node in nodes):
        return False
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    reads = sum(_is_read(node, key) for node in nodes)
    after_setting = sum(_reads_after_setting(function, key) for function in functions)
    return 0 < reads == after_setting


def _names_in_unseen_code(kind: type) -> Iterator[tuple[Any, ...]]:
    """The names in methods of a library's class, and in those that Python has made for a dataclass."""
    for value in list(vars(kind).values()):
        for code in codes_of(value):
            if code.co_filename.startswith("<") or not is_of_user(kind.__module__):
                yield (*code.co_names, *code.co_consts)


def _may_read_all(node: ast.AST, kind: type, key: str) -> bool:
    """Whether this names the attribute in a string, as for getattr(), or may read whatever attributes there are.

    Those of settings and other helpers may be read so elsewhere, those of a task or a module by itself.
    """
    may_be_elsewhere = not issubclass(kind, (Task, nn.Module))
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__" and (may_be_elsewhere or ast.unparse(node) == "self.__dict__")
    if isinstance(node, ast.Call):
        name, first = ast.unparse(node.func).rpartition(".")[2], [ast.unparse(argument) for argument in node.args[:1]]
        is_computed = not all(isinstance(argument, ast.Constant) for argument in node.args[1:2])
        return (name in _OF_ALL and (may_be_elsewhere or first == ["self"])) or (name == "getattr" and is_computed)
    return isinstance(node, ast.Constant) and bool(node.value == key)


def _is_read(node: ast.AST, key: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Attribute) and node.target.attr == key
    return isinstance(node, ast.Attribute) and node.attr == key and isinstance(node.ctx, ast.Load)


def _reads_after_setting(function: ast.FunctionDef | ast.AsyncFunctionDef, key: str) -> int:
    """How often a method reads an attribute of its object, or of one in it, if it always sets that first; else 0."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    nodes = list(_own_nodes(function))
    later = {inner for node in nodes if isinstance(node, _LATER) for inner in ast.walk(node)}
    reads = [node for node in nodes if _is_read(node, key)]
    owners = {_owner_of(node) for node in reads}
    if len(owners) != 1 or not arguments or later.intersection(reads):
        return 0
    (owner,) = owners
    wholes = set(_wholes_of(owner))
    is_rebound = any(
        isinstance(getattr(node, "ctx", None), ast.Store) and ast.unparse(node) in wholes for node in nodes
    )
    waits = any(isinstance(node, _WAITING) for node in nodes)
    if arguments[0].arg not in wholes or is_rebound or waits or reads_before_setting(function, f"{owner}.{key}"):
        return 0
    return len(reads)


def _wholes_of(owner: str) -> Iterator[str]:
    """An object in another, such as ``self.net[0]``, and what it is a part of; nothing if that is computed."""
    node = ast.parse(owner, mode="eval").body
    while isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
        yield ast.unparse(node)
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            yield from _own_nodes(node)


def _owner_of(node: ast.AST) -> str:
    """The object of which a node reads or sets an attribute, as it is written."""
    value = getattr(getattr(node, "target", node), "value", None)
    return ast.unparse(value) if isinstance(value, ast.expr) else ""
