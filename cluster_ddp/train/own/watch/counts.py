"""Detects numbers that control a custom loop and that no checkpoint contains: batch counts, best values, patience."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from cluster_ddp.train.objects.live_variables import is_read_first, names_read
from cluster_ddp.train.objects.syntax import (
    added_to,
    assigned,
    begins_with_number,
    below,
    counted,
    holder_of,
    is_gradient,
    is_held,
    is_of_clock,
    is_read,
    name_of,
    name_to_keep,
    nodes_around,
    statement_of,
)
from cluster_ddp.train.objects.whose_code import is_library_file
from cluster_ddp.train.own.program import (
    found_or_nothing,
    reachable,
    running_variables,
)
from cluster_ddp.train.own.values import is_number
from cluster_ddp.train.own.watch.bodies import (
    Text,
    in_running,
    is_early_stopper,
    tree_of_object,
    value_of,
    with_parents,
)
from cluster_ddp.train.own.watch.matters import feeding_loss, is_decay, is_decisive, sets_rate
from cluster_ddp.train.own.watch.reported import Report
from cluster_ddp.train.own.watch.saved import Saved, how_to_keep, is_restored

_OF_EPOCH = re.compile(r"epoch|\blen\(")
_COPIES = re.compile(r"\b(state_dict|deepcopy)\(")
_METHODS_THAT_CHANGE = {"load_state_dict", "update_parameters"}


def watch_counts(saved: Saved, report: Report) -> Iterator[None]:
    """Warn, after the second step, about numbers on which a loop depends and that start over after a resume.

    First, ``step += 1`` that ends the loop or sets its learning rate, as in ``if step >= max_steps: break``. Then other
    numbers that a batch or an epoch takes over from the previous one and compares, such as the best accuracy so far and
    the epochs since, and copies of the weights. Last, the program's own objects for early stopping. The source of the
    running functions shows whether a number is compared, or goes into an assignment or the loss. Numbers that are only
    printed, logged, or used every n steps (``step % 100``) are not reported, unless a model is called or changed there,
    nor are those of a generator that only passes the batches on.

    Parameters
    ----------
    saved
        What need not be checked.
    report
        Called with the message.
    """
    yield
    found = list(in_running(functools.partial(_unkept_in, saved=saved)))
    counts = {name for name, is_count in found if is_count}
    if counts:
        first = name_to_keep(min(counts))
        report(
            f"the loop counts its batches in {', '.join(sorted(counts))}, and uses that count: after a resume it "
            "starts counting again, so a limit, a learning rate or a periodic change of a model that depends on it "
            f"is not exact. Keep it: kept = run.keep({first}=0), and kept.{first} += 1 in the loop; or let it "
            "begin at run.step, the number of finished steps",
            counts,
        )
    if carried := {name for name, _ in found} - counts:
        names = sorted(set(map(name_to_keep, carried)))
        report(
            f"the loop depends on {', '.join(sorted(carried))}, which no checkpoint contains: a resume restarts "
            "from the initial value, and stops, sets the rate, computes a loss or saves a best model differently. "
            f"Keep it: {how_to_keep(*names)}",
            carried,
        )
    stoppers = list(_early_stoppers())
    for kind, name in sorted({(type(found).__name__, name_to_keep(name)) for name, found in stoppers}):
        report(
            f"{name} is an {kind} without state_dict(), so no checkpoint contains what it counts: after a resume "
            "it starts counting again, and training ends in a different epoch. Give it state_dict(), which returns "
            f"its numbers in a dict, and load_state_dict(), which restores them, and pass it in ({name}={name})",
            (name for name, _ in stoppers),
        )


def _unkept_in(text: Text, frame: FrameType, saved: Saved) -> Iterator[tuple[str, bool]]:
    """What a running function depends on and no checkpoint contains, each with whether it counts the batches."""
    loops = [loop for loop in text.loops if isinstance(loop, ast.For)]
    if not loops or _only_passes_on(loops[0], text.parents):
        return
    of_loops, find = Text(text.parents, list(loops)), functools.partial(value_of, frame=frame)
    found = [*((name, True) for name in _counts_in(of_loops, find)), *((name, False) for name in _carried_in(of_loops))]
    numbers = [(name, is_count) for name, is_count in found if is_number(find(name))]
    copies = ((name, False) for name in _copied_weights_in(of_loops, find))
    yield from ((name, is_count) for name, is_count in (*numbers, *copies) if not saved.has_named(name, frame))


def _changes_model(body: Sequence[ast.AST], find: Callable[[str], Any], depth: int = 1) -> bool:
    """Whether statements change a model, or call one as in training, which changes its statistics.

    Parameters
    ----------
    find
        Returns the value of a variable or an attribute there.
    depth
        How far to look into the program's own functions that are called there.
    """
    calls = [node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
    named = [(call, name) for call in calls if (name := name_of(call.func)) is not None]
    evaluates = any(name.endswith(".eval") for _, name in named)
    for call, name in named:
        owner, _, method = name.rpartition(".")
        with contextlib.suppress(Exception):  # not a variable or an attribute, or no source
            if method in _METHODS_THAT_CHANGE and isinstance(find(owner), nn.Module):
                return True
            found = find(name)
            if evaluates:
                continue
            if isinstance(found, nn.Module):
                changes = found.training and any(buffer.is_floating_point() for buffer in found.buffers())
            else:
                looks_inside = depth > 0 and not is_library_file(inspect.getfile(found))
                inside = [tree_of_object(found)] if looks_inside else []
                changes = _changes_model(inside, functools.partial(_in_call, call, found, find), depth - 1)
            if changes:
                return True
    return False


def _in_call(call: ast.Call, function: Any, find: Callable[[str], Any], name: str) -> Any:
    """The value that a variable, or an attribute of one, has where this call begins, if it passes it on by its name."""
    first, *inner = name.split(".")
    given = _given(call, function)
    if first in given:
        value = find(name_of(given[first]) or "")
    elif inspect.ismethod(function) and first == next(iter(function.__func__.__code__.co_varnames)):
        value = function.__self__
    else:
        value = function.__globals__[first]
    return functools.reduce(getattr, inner, value)


def _given(call: ast.Call, function: Any) -> dict[str, ast.expr]:
    """The arguments of a call, by the names of the function's parameters."""
    by_name = {word.arg or "": word.value for word in call.keywords}
    return inspect.signature(function).bind(*call.args, **by_name).arguments


def _early_stoppers() -> Iterator[tuple[str, Any]]:
    """Early stopping objects of the program's own classes, which most programs write themselves."""
    for name, found in found_or_nothing(reachable(running_variables(), 2)):
        if is_early_stopper(found) and not callable(getattr(found, "state_dict", None)):
            yield name, found


def _only_passes_on(loop: ast.For, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a generator yields each batch as it is, as those do that time and print: no count changes its batches."""
    inside = list(below(loop, parents))
    yields = [node for node in inside if isinstance(node, ast.Yield)]
    batch = ast.unparse(loop.target)
    return (
        bool(yields)
        and all(node.value is not None and ast.unparse(node.value) == batch for node in yields)
        and not any(isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise)) for node in inside)
    )


def _counts_in(text: Text, find: Callable[[str], Any]) -> Iterator[str]:
    parents, inner, outer = text.parents, text.loops[-1], text.loops[0]
    for name in {target for node in below(inner, parents) if (target := counted(node)) is not None}:
        others = [node for node in parents if name in assigned(node) and counted(node) is None]
        if not (others or is_held(name)) or not all(
            begins_with_number(node, name) or _begins_epoch(node) for node in others
        ):
            continue  # not a local variable, or its initial value may be the position
        if any(holder_of(name) in assigned(node) for node in below(outer, parents)):
            continue  # in a dict that is made in each epoch
        if any(inner in nodes_around(node, parents) for node in others):
            continue  # counts within a batch
        is_of_epoch = any(outer in nodes_around(node, parents) for node in others if not _begins_epoch(node))
        uses = (node for node in below(outer, parents) if is_read(node, name))
        if any(
            is_decisive(node, name, parents, is_of_epoch=is_of_epoch)
            or any(_changes_model(part.body, inside) for part, inside in _decided_every_so_often(node, parents, find))
            for node in uses
        ):
            yield name


def _carried_in(text: Text) -> Iterator[str]:
    """Variables that start as a number, are carried from one pass through a loop to the next, and are compared."""
    parents, outer = text.parents, text.loops[0]
    feeding = names_read(feeding_loss(text).statements)
    shared = {name for node in parents if isinstance(node, ast.Global) for name in node.names}
    assigning = {node: names for node in parents if (names := assigned(node))}
    for loop in text.loops:
        inside = {node: names for node, names in assigning.items() if loop in nodes_around(node, parents)}
        reading = names_read(node for node in below(loop, parents) if isinstance(node, ast.stmt))
        for name in sorted({name for names in inside.values() for name in names}):
            before = [node for node, names in assigning.items() if name in names and node not in inside]
            decays = any(is_decay(node) for node, names in inside.items() if name in names)
            begins = name in shared or any(map(begins_with_number, before))
            if _is_restored(before, parents, begins=begins):
                continue
            starts_over = begins or is_held(name)
            if is_gradient(name) or any(is_of_clock(node) for node, names in inside.items() if name in names):
                continue
            if is_read_first(loop.body, name, reading):
                uses = (node for node in below(outer, parents) if is_read(node, name))
                if any(
                    sets_rate(statement_of(node, parents))
                    or ((starts_over or decays) and is_decisive(node, name, parents, is_of_epoch=not decays))
                    for node in uses
                ):
                    yield name
                elif starts_over and is_read_first(loop.body, name, feeding):
                    resets = (node for node, names in inside.items() if name in names)
                    if not any(begins_with_number(node, name) for node in resets):  # as sums of losses between updates
                        yield name


def _copied_weights_in(text: Text, find: Callable[[str], Any]) -> Iterator[str]:
    """Variables that epochs set to a copy of the weights, or to which they add one, and that are read afterwards."""
    outer = text.loops[0]
    read = {name_of(node) for node in text.parents if getattr(node, "lineno", 0) > (outer.end_lineno or 0)}
    for node in below(outer, text.parents):
        value = getattr(node, "value", None)
        if not isinstance(node, ast.stmt) or value is None or not _COPIES.search(ast.unparse(value)):
            continue
        inside = itertools.takewhile(lambda around: around is not outer, nodes_around(node, text.parents))
        if isinstance(node, ast.Assign) and any(isinstance(around, ast.If) for around in inside):
            yield from (name for name in assigned(node) if name in read and "[" not in name)
        if _copies_model(value, find):
            yield from added_to(node) & read


def _copies_model(value: ast.AST, find: Callable[[str], Any]) -> bool:
    """Whether this calls `state_dict`, or a function of a model itself."""
    for call in (node for node in ast.walk(value) if isinstance(node, ast.Call)):
        if (name_of(call.func) or "").endswith("state_dict"):
            return True
        with contextlib.suppress(Exception):  # neither a variable nor an attribute
            if any(isinstance(find(name_of(argument) or ""), nn.Module) for argument in call.args):
                return True
    return False


def _begins_epoch(node: ast.AST) -> bool:
    """Whether this assigns the number of batches before the epoch, as in ``num_updates = epoch * len(loader)``."""
    value = getattr(node, "value", None)
    text = ast.unparse(value) if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) else ""
    return _OF_EPOCH.search(text) is not None and ".step" not in text


def _is_restored(before: Sequence[ast.AST], parents: dict[ast.AST, ast.AST], *, begins: bool) -> bool:
    """Whether a variable has a value from run.step or run.keep, or the optimizer's rate, where a loop begins.

    Parameters
    ----------
    before
        What assigns it outside of the loop.
    begins
        Whether one of these sets it to a literal number; that may come first, or be the other branch of an ``if``.
    """
    restored = [node for node in before if is_restored(node)]
    if not begins:
        return bool(restored)

    def is_last(node: ast.AST) -> bool:
        around = {part for part in nodes_around(node, parents) if isinstance(part, ast.If)}
        later = (other for other in before if other.lineno > node.lineno)  # type: ignore[attr-defined]
        return all(not around.isdisjoint(nodes_around(other, parents)) for other in later)

    return any(map(is_last, restored))


def _decided_every_so_often(
    use: ast.AST, parents: dict[ast.AST, ast.AST], find: Callable[[str], Any], depth: int = 1
) -> Iterator[tuple[ast.If, Callable[[str], Any]]]:
    """The ``if count % 100 == 0:`` that this use of a count decides, also in a function to which it is passed.

    Each with what returns the value of a variable there.
    """
    around = list(nodes_around(use, parents))
    if any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in around):
        statements = (node for node in around if isinstance(node, ast.stmt))
        yield from ((node, find) for node in itertools.islice(statements, 1) if isinstance(node, ast.If))
    call = next((node for node in around[:2] if isinstance(node, ast.Call)), None)
    if call is not None and depth > 0:
        with contextlib.suppress(Exception):  # it has no source, or does not take the count as it is
            function = find(name_of(call.func) or "")
            given = _given(call, function)
            if not is_library_file(inspect.getfile(function)):
                inside = with_parents(tree_of_object(function).body[0])
                for node in inside:
                    if any(value is use and is_read(node, name) for name, value in given.items()):
                        found_there = functools.partial(_in_call, call, function, find)
                        yield from _decided_every_so_often(node, inside, found_there, depth - 1)
