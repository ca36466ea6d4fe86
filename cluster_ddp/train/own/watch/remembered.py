"""Detects what a custom loop sets in one batch or epoch that decides the loss, or the end, of later ones."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, GeneratorType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.train.objects.live_variables import is_read_first, names_read
from cluster_ddp.train.objects.syntax import (
    added_to,
    assigned,
    below,
    counted,
    is_gradient,
    is_of_clock,
    name_of,
    name_to_keep,
    nodes_around,
    statement_of,
    taken_from,
)
from cluster_ddp.train.objects.whose_code import is_library_file, is_ours
from cluster_ddp.train.own.watch.bodies import Text, in_running, tree_of_object, value_or_none, with_parents
from cluster_ddp.train.own.watch.matters import feeding_loss, sets_rate_of_optimizer
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved, how_to_keep, is_restored

_CONSTANT = {"len", "int", "float", "bool", "isinstance", "hasattr", "getattr"}  # calls that decide the same each time
_WRAPPING = (zip, map, filter, enumerate)  # what goes through the batches themselves
# As in vae = vae.to(device).
_MOVES = {"to", "cuda", "cpu", "float", "half", "bfloat16", "double", "train", "eval", "requires_grad_"}
_SETTING = (ast.Assign, ast.AugAssign, ast.AnnAssign)
_Uses = dict[ast.AST, set[str]]


def watch_remembered(saved: Saved, report: Reported) -> Iterator[None]:
    """Warn, after the second step, about variables that a pass through a loop sets and a later one depends on.

    Examples are ``if epoch == 10: criterion = ...``, ``weights = 1 + errors`` after the batches, ``stage = "main"``
    once the loss is small, a list of losses that ends the training, or ``next(tasks)``. Unlike `watch_counts`, which
    looks at numbers, and `watch_carried`, which looks at tensors that have changed, this only looks at the source, so
    that it reports them long before they change.

    What is set again whenever the loop gets there is not reported: before it is used, once only if it is None, or in
    ``if epoch >= 10:``. Nor is what is only printed, or what the loop deletes when it has used it.

    Parameters
    ----------
    saved
        What need not be checked.
    report
        Called with the message; what it has reported before is not reported again.
    """
    yield
    found = {name: value for name, value in _unsaved(saved) if not report.has(name)}
    if names := sorted(name for name, value in found.items() if isinstance(value, Iterator)):
        report(
            f"the loss depends on what the loop takes from {', '.join(names)} one after another, which starts over "
            "after a resume, because no checkpoint contains its position: a resume is not exact. Compute it from "
            "the number of the step (run.step), as in tasks[run.step % len(tasks)]"
        )
    if names := sorted(found.keys() - names):
        first = name_to_keep(names[0])
        report(
            f"the loop sets {', '.join(names)} in one batch or epoch, and later ones compute their loss or learning "
            "rate from it, or end because of it, but no checkpoint contains it: a resume starts with what it is before "
            f"the loop, and is not exact. Keep a number, string, list or tensor: {how_to_keep(first)}. Set anything "
            "else again before each use: from the number of the epoch (`if epoch >= 2:` rather than `==`), from "
            "run.step, or from what is kept"
        )


def _unsaved(saved: Saved) -> Iterator[tuple[str, Any]]:
    """The variables, with their values."""
    inside: Callable[[Text, FrameType], _Uses] | None = None

    def found(text: Text, frame: FrameType) -> Iterator[tuple[str, Any]]:
        nonlocal inside
        uses = {**_uses_in(text), **_uses_of_calls(text, frame), **(inside(text, frame) if inside else {})}
        names = (name for name in _remembered(text, uses, frame) if not saved.has_named(name, frame))
        found = ((name, value_or_none(name, frame)) for name in names)
        yield from ((name, value) for name, value in found if not _goes_on_by_itself(value))
        inside = functools.partial(_uses_by_call, called=frame.f_code, names=_all_names(uses))

    return in_running(found)


def _goes_on_by_itself(found: Any) -> bool:
    """Whether this passes on the batches of the loader, or is of this package: its place is that of the run."""
    if isinstance(found, GeneratorType):
        return inspect.getgeneratorstate(found) in (inspect.GEN_CREATED, inspect.GEN_RUNNING)
    return is_ours(found) or isinstance(found, (_BaseDataLoaderIter, *_WRAPPING))


def _uses_in(text: Text) -> _Uses:
    """What the running loops compute the loss from, what decides whether they do, and whether they end."""
    if not text.loops:
        return {}
    statements = set(feeding_loss(text).statements)
    steps = set(below(text.loops[-1], text.parents))
    anywhere = set(below(text.loops[0], text.parents))
    for node in statements & anywhere:
        places = anywhere if sets_rate_of_optimizer(node, text.parents) else steps
        statements |= {around for around in nodes_around(node, text.parents) if around in places and _is_choice(around)}
    for node in anywhere:
        if isinstance(node, (ast.Break, ast.Return)):
            statements |= {around for around in (text.parents[node],) if _is_choice(around)}
    uses = names_read(statements)
    for statement in statements:  # an object that is called may depend on all of its attributes
        called = {name_of(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
        setting = {name for node in below(text.loops[0], text.parents) for name in assigned(node)}
        uses[statement] |= {name for name in setting if name.rpartition(".")[0] in called}
    return uses


def _is_choice(node: ast.AST) -> bool:
    return isinstance(node, (ast.If, ast.While))


def _uses_of_calls(text: Text, frame: FrameType) -> _Uses:
    """What the innermost running loop passes on to functions of the program that compute a loss from it."""
    uses: _Uses = {}
    for call in (node for loop in text.loops[-1:] for node in below(loop, text.parents) if isinstance(node, ast.Call)):
        function = inspect.unwrap(getattr(found := value_or_none(name_of(call.func) or "", frame), "__func__", found))
        if inspect.isfunction(function) and not is_library_file(function.__code__.co_filename):
            for scope in tree_of_object(function).body:
                inner = _all_names(_uses_in(Text(with_parents(scope), [scope])))  # type: ignore[list-item]
                statement = statement_of(call, text.parents)
                uses[statement] = uses.get(statement, set()) | _passed_on(call, function.__code__, inner)
    return uses


def _uses_by_call(text: Text, frame: FrameType, called: CodeType, names: set[str]) -> _Uses:
    """What the statement that is running passes on to a function for one of these names there."""
    return {
        statement_of(call, text.parents): _passed_on(call, called, names)
        for call in (node for node in text.parents if isinstance(node, ast.Call))
        if call.lineno <= frame.f_lineno <= (call.end_lineno or 0)
        and (name_of(call.func) or "").rpartition(".")[2] == called.co_name
    }


def _passed_on(call: ast.Call, code: CodeType, names: set[str]) -> set[str]:
    """The names by which a call passes on what a function has under these names, or by which both have it."""
    parameters = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    given = {word.arg: word.value for word in call.keywords}
    if isinstance(call.func, ast.Attribute) and parameters[:1] == ["self"]:
        given[parameters.pop(0)] = call.func.value
    given |= dict(zip(parameters, call.args, strict=False))
    found: set[str] = set()
    for name in names:
        first, dot, rest = name.partition(".")
        if first in given:
            found.add(f"{name_of(given[first])}{dot}{rest}")
        elif first not in code.co_varnames:
            found.add(name)
    return found


def _all_names(uses: _Uses) -> set[str]:
    return {name for names in uses.values() for name in names}


def _remembered(text: Text, uses: _Uses, frame: FrameType) -> Iterator[str]:
    names, growing = _all_names(uses), set[str]()
    setting = {node: names_set for node in text.parents if (names_set := _set_by(node))}
    restored = {node for node in setting if is_restored(node)}
    places = {name for node in restored for name in setting[node]}  # such as step = run.step
    for loop in text.loops:
        inside = list(below(loop, text.parents))
        set_here = {name for node in inside for name in setting.get(node, ())}
        growing |= assigned(loop) | {name for node in inside if (name := counted(node)) is not None}
        growing = {name for name in growing if type(value_or_none(name, frame)) is int}
        varying = {name for node in (*text.loops, *inside) for name in assigned(node)} | set_here
        certain = {node for node in inside if isinstance(node, ast.If) and _holds_on(node, growing, varying)}
        deleted = {name_of(part) for node in inside if isinstance(node, ast.Delete) for part in node.targets}
        for name in sorted(set_here & names - assigned(loop) - deleted):
            nodes = [node for node, found in setting.items() if name in found]
            if is_gradient(name) or any(map(is_of_clock, nodes)) or any(map(counted, nodes)) or _is_sum(nodes, name):
                continue
            if all(sets_rate_of_optimizer(node, text.parents) for node in nodes):
                continue
            if not restored.isdisjoint(nodes) or any(
                not places.isdisjoint(names_read([node])[node]) for node in nodes if node not in inside
            ):
                continue
            once = {node for node in inside if isinstance(node, ast.If) and _is_if_none(node, name)}
            others = {node: read for node, read in uses.items() if node not in once}
            if is_read_first(loop.body, name, others, certain | once):
                yield name


def _set_by(node: ast.AST) -> set[str]:
    """What a statement sets, adds an item to, or takes the next item of."""
    if not isinstance(node, (*_SETTING, ast.Expr)):
        return taken_from(node)
    call = getattr(node, "value", None)
    owner, _, method = (name_of(call.func) or "").rpartition(".") if isinstance(call, ast.Call) else ("", "", "")
    return (assigned(node) | added_to(node)) - ({owner} if method in _MOVES else set())


def _is_sum(nodes: list[ast.AST], name: str) -> bool:
    """Whether it adds up something that is set back in between, such as the losses until the next update."""
    adds = [node for node in nodes if name in names_read([node])[node] or name in added_to(node)]
    resets = [node for node in nodes if isinstance(node, ast.Assign) and node not in adds]
    return bool(adds) and len(resets) > 1


def _is_if_none(node: ast.If, name: str) -> bool:
    return ast.unparse(node.test) in (f"{name} is None", f"not {name}")


def _holds_on(node: ast.If, growing: set[str], varying: set[str]) -> bool:
    """Whether this ``if`` decides the same in each pass, or for all later ones, as ``if epoch >= 10:``."""
    parts = list(ast.walk(node.test))
    names = {name for part in parts if (name := name_of(part)) is not None}
    calls = {name_of(part.func) for part in parts if isinstance(part, ast.Call)}
    if not names.isdisjoint(varying - growing) or not calls <= _CONSTANT:
        return False
    is_constant = not any(name in growing or name.endswith(".step") for name in names)
    compares = [part for part in parts if isinstance(part, ast.Compare)]
    return is_constant or (not node.orelse and all(_grows(part, growing) for part in compares))


def _grows(compare: ast.Compare, growing: set[str]) -> bool:
    """Whether this compares what is always the same, or a number that grows from pass to pass with a bound."""
    sides = [
        [part for part in ast.walk(side) if (name_of(part) or "").endswith(".step") or name_of(part) in growing]
        for side in (compare.left, *compare.comparators)
    ]
    upper = 0 if isinstance(compare.ops[0], (ast.Gt, ast.GtE)) else 1
    is_bound = isinstance(compare.ops[0], (ast.Gt, ast.GtE, ast.Lt, ast.LtE)) and len(compare.ops) == 1
    is_remainder = any(isinstance(part, ast.Mod) for part in ast.walk(compare))
    return not any(sides) or (is_bound and not is_remainder and not sides[1 - upper])
