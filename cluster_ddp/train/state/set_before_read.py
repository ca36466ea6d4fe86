"""Recognizes what each step sets before it reads it, such as the features that a forward hook puts into a dict.

A step that needed what the one before left there could not have been the first one, which found nothing there, or an
attribute of None: unless the program asks whether there is something, or sets something else in the first step, which
its source shows.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterator

from torch import Tensor

from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.objects.comparing import is_same
from cluster_ddp.train.objects.inner_parts import CONTAINERS
from cluster_ddp.train.objects.live_variables import is_read_first, own_parts
from cluster_ddp.train.objects.snapshot import LENGTH
from cluster_ddp.train.objects.syntax import SCOPES
from cluster_ddp.train.objects.whose_code import is_of_user

_CONTAINERS = (dict, collections.OrderedDict, list)
_FILLING = {"append", "clear", "__setitem__"}  # methods that read nothing
_MISSING = re.compile(r"\b(Attribute|Key|Index|Lookup|Base)?(Error|Exception)\b|suppress")
_PLACES = (ast.Attribute, ast.Subscript)


def set_before_read(changed: Collection[str], before: Attributes, first: Attributes, second: Attributes) -> set[str]:
    """The places, of those that have changed, that each step fills before reading them.

    Parameters
    ----------
    before, first, second
        What there was before the first step, after it, and after the second.
    """
    places = {place for name in changed if (place := _place(name, before)) is not None}
    return {
        place
        for place in places
        if _is_replaced(place, first, second)
        and _is_emptied(place.rpartition(".")[0], before, first, second)
        and _is_only_read_where_set(place, before)
    }


def is_within(name: str, places: Collection[str]) -> bool:
    """Whether this is the name of one of the places, or of something in it."""
    return any(name == place or name.startswith((f"{place}.", f"{place}, ")) for place in places)


def is_length_of(name: str, places: Collection[str]) -> bool:
    """Whether this is the length of a list whose elements are such places."""
    return name.endswith(LENGTH) and any(place.rpartition(".")[0] == name.removesuffix(LENGTH) for place in places)


def _place(name: str, before: Attributes) -> str | None:
    """The outermost part of a name under which there was nothing, or None, at first; None if there was something."""
    parts = name.partition(", ")[0].split(".")
    wholes = (".".join(parts[:length]) for length in range(2, len(parts) + 1))
    return next((whole for whole in wholes if not before.has(whole) or before.leaves.get(whole, "") is None), None)


def _is_replaced(place: str, first: Attributes, second: Attributes) -> bool:
    """Whether the second step has put something else there."""
    then, now = ({name for name in at.leaves if is_within(name, (place,))} for at in (first, second))
    tensors = [name for name in now if isinstance(second.leaves[name], Tensor)]
    values = tensors or [name for name in now if second.is_value(name) and not name.endswith(LENGTH)]
    return then == now and bool(values) and not any(is_same(first.leaves[name], second.leaves[name]) for name in values)


def _is_emptied(holder: str, *moments: Attributes) -> bool:
    """Whether what holds a place is no list, or one that each step empties."""
    none, then, now = (at.leaves.get(holder + LENGTH) for at in moments)
    return none in (None, 0) and (none is None or then == now)


def _is_only_read_where_set(place: str, before: Attributes) -> bool:
    holder, _, key = place.rpartition(".")
    kind = before.kind(holder)
    if kind in _CONTAINERS:
        return not before.has(place) and is_only_read_where_set(holder.rpartition(".")[2], is_container=True)
    if isinstance(kind, type) and issubclass(kind, CONTAINERS):
        return False  # a defaultdict gives something anyway
    return is_only_read_where_set(key, is_container=False, may_be_none=before.has(place))


def is_only_read_where_set(name: str, *, is_container: bool, may_be_none: bool = False) -> bool:
    """Whether the program fails wherever it reads an attribute, or an element of a container, that is not there.

    Also whether no function that sets it may read it before, as one that begins a running mean in the first step.

    Parameters
    ----------
    name
        That of the attribute; of a container, that of the variable or attribute that holds it.
    may_be_none
        Whether None is in the attribute in place of nothing.
    """
    trees = list(trees_with(name))
    uses = [use for tree in trees for use in _uses(tree, name, is_container=is_container, may_be_none=may_be_none)]
    return bool(uses) and all(uses)


def trees_with(name: str) -> Iterator[ast.Module]:
    """The syntax trees of the user's modules in which a name occurs."""
    for module in [module for key, module in list(sys.modules.items()) if is_of_user(key)]:
        try:
            if name in (source := inspect.getsource(module)):
                yield _parsed(source)
        except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
            continue


@functools.lru_cache(maxsize=20)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _uses(tree: ast.Module, name: str, *, is_container: bool, may_be_none: bool) -> Iterator[bool]:
    """For each use of a name, whether it sets something there, or fails where there is nothing; see above."""
    parents = _parents_in(tree)
    places: dict[ast.AST, set[str]] = collections.defaultdict(set)  # that functions set
    for node in parents:
        if isinstance(node, ast.Constant) and node.value == name:
            yield False  # hasattr() and the like
        elif isinstance(node, ast.Name) and node.id == name and isinstance(parents.get(parents[node]), ast.ClassDef):
            yield False  # what the class gives where the object has nothing
        elif (isinstance(node, ast.Attribute) and node.attr == name) or (
            is_container and isinstance(node, ast.Name) and node.id == name
        ):
            is_load, parent = isinstance(node.ctx, ast.Load), parents[node]
            place = parent if is_container and isinstance(parent, ast.Subscript) else node
            if isinstance(place, _PLACES) and isinstance(place.ctx, ast.Store):
                places[_function_of(place, parents)].add(ast.unparse(place))
            may_be_nothing = _may_be_empty(node, parent, is_container) or (may_be_none and _may_be_none(node, parent))
            yield not (is_load and (may_be_nothing or _is_caught(node, parents)))
    for function, places_there in places.items():
        yield not any(reads_before_setting(function, place) for place in places_there)


def is_caught(name: str) -> bool:
    """Whether the program catches that ``self`` has no attribute of this name."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{name}" and _is_caught(node, parents)
        for parents in map(_parents_in, trees_with(name))
        for node in parents
        if isinstance(getattr(node, "ctx", None), ast.Load)
    )


def _parents_in(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    return {inner: node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}


def _function_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    while node in parents and not isinstance(node, SCOPES):
        node = parents[node]
    return node


def _may_be_empty(node: ast.AST, parent: ast.AST, is_container: bool) -> bool:
    if not is_container:
        return False
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return isinstance(parent.slice, ast.Slice) and not isinstance(parent.ctx, ast.Store)
    return not (isinstance(parent, ast.Attribute) and parent.attr in _FILLING)


def _may_be_none(node: ast.AST, parent: ast.AST) -> bool:
    is_computed_with = isinstance(parent, ast.BinOp)
    return not (is_computed_with or (isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is node))


def _is_caught(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether an error in this is caught there."""
    while (parent := parents.get(node)) is not None:
        caught: list[ast.expr | None] = []
        if isinstance(parent, ast.Try) and node in parent.body:
            caught = [handler.type for handler in parent.handlers]
        elif isinstance(parent, ast.With):
            caught = [item.context_expr for item in parent.items]
        if any(part is None or _MISSING.search(ast.unparse(part)) for part in caught):
            return True
        node = parent
    return False


def reads_before_setting(function: ast.AST, place: str) -> bool:
    """Whether a function may read an attribute, or an element of a container, before it sets it.

    Parameters
    ----------
    place
        The attribute or element, as it is written.
    """
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    reading: dict[ast.AST, set[str]] = {
        node: {place} for node in statements for part in own_parts(node) if _reads(part, place)
    }
    return bool(is_read_first(getattr(function, "body", []), place, reading, may_skip=True))


def _reads(part: ast.AST, place: str) -> bool:
    return any(_is_read(node, place) for node in ast.walk(part))


def _is_read(node: ast.AST, place: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, _PLACES) and ast.unparse(node.target) == place
    return isinstance(node, _PLACES) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == place
