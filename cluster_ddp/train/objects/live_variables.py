"""Liveness: whether statements read a value from before them, as the body of a loop reads what it carries along."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Mapping, Sequence

from cluster_ddp.train.objects.syntax import SCOPES, added_to, assigned, holder_of, is_read, name_of

_Uses = Mapping[ast.AST, set[str]]
_PLACES = (ast.Name, ast.Attribute, ast.Subscript)
_BRANCHES = (ast.ExceptHandler, ast.match_case)
_SKIPPED = (ast.For, ast.While, ast.Try)
_LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)


def is_read_first(
    body: Sequence[ast.stmt], name: str, uses: _Uses, certain: Container[ast.AST] = (), *, may_skip: bool = False
) -> bool | None:
    """Whether some path through these statements reads `name` before setting it; None if every path sets it first.

    Parameters
    ----------
    uses
        The statements in which reading counts, and the names that each of them reads.
    certain
        Statements ``if ...:`` that are taken to set what one of their branches sets.
    may_skip
        Whether a loop within may have nothing to go over, and a ``try`` fail before it sets it.
    """
    for statement in body:
        if isinstance(statement, SCOPES):
            continue
        own = own_parts(statement)
        if name in uses.get(statement, ()):
            return True
        if any(not {name, holder_of(name)}.isdisjoint(_stored(part)) for part in own):
            return None
        blocks = [block for part in ("body", "orelse", "finalbody") if (block := getattr(statement, part, []))]
        blocks += [part.body for part in ast.iter_child_nodes(statement) if isinstance(part, _BRANCHES)]
        ways = [is_read_first(block, name, uses, certain, may_skip=may_skip) for block in blocks]
        if True in ways:
            return True
        if statement in certain:
            if None in ways:
                return None
        elif isinstance(statement, ast.With) or (isinstance(statement, _SKIPPED) and not may_skip):
            if None in ways[:1] and not any("suppress" in ast.unparse(part) for part in own):
                return None
        elif isinstance(statement, ast.Match) or (isinstance(statement, ast.If) and statement.orelse):
            is_over = [way is None or isinstance(block[-1], _LEAVING) for way, block in zip(ways, blocks, strict=True)]
            if None in ways and all(is_over):
                return None
    return False


def own_parts(statement: ast.AST) -> list[ast.AST]:
    """What a statement itself computes: the test of an ``if``, what a ``for`` goes over, else all of it."""
    parts = list(ast.iter_child_nodes(statement))
    inner = [part for part in parts if isinstance(part, (ast.stmt, *_BRANCHES))]
    return [part for part in parts if part not in inner] if inner else [statement]


def names_read(statements: Iterable[ast.AST]) -> dict[ast.AST, set[str]]:
    """What each of these statements reads itself, for `is_read_first`."""
    return {statement: {name for part in own_parts(statement) for name in _names_in(part)} for statement in statements}


def _names_in(part: ast.AST) -> set[str]:
    """What a part of a statement reads, without the variables of comprehensions and lambdas in it."""
    nodes = list(ast.walk(part))
    inner = {name for node in nodes if isinstance(node, ast.comprehension) for name in assigned(node)}
    inner |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    if isinstance(part, ast.Assign):  # what it fills is read by it only if the value has it, too
        inner |= added_to(part) - {name for node in ast.walk(part.value) for name in _read_by(node)}
    return {name for node in nodes for name in _read_by(node)} - inner


def _read_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.AugAssign):
        return assigned(node)
    name = name_of(node)
    return set() if name is None or not is_read(node, name) else {name}


def _stored(part: ast.AST) -> set[str]:
    """What a part of a statement sets, or fills item by item, as in ``rewards[step] = reward``."""
    places = (node for node in ast.walk(part) if isinstance(node, _PLACES) and isinstance(node.ctx, ast.Store))
    found = {name_of(node) or ast.unparse(node) for node in places}
    return found | added_to(part) if isinstance(part, ast.Assign) else found
