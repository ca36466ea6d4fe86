"""Detects numbers that functions outside of the running loop carry along, such as best values and exploration rates."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from cluster_ddp.train.objects.syntax import (
    FUNCTIONS,
    FunctionNode,
    assigned,
    begins_with_number,
    built_on_itself,
    is_held,
    is_of_clock,
    name_of,
)
from cluster_ddp.train.objects.whose_code import is_own_class
from cluster_ddp.train.own.kept import Kept
from cluster_ddp.train.own.program import (
    found_or_nothing,
    reachable,
    running_frames,
    running_variables,
    variables_of,
)
from cluster_ddp.train.own.values import is_number
from cluster_ddp.train.own.watch.bodies import (
    is_early_stopper,
    program_files,
    read_once,
    source_of,
    tree_of,
    with_parents,
)
from cluster_ddp.train.own.watch.matters import compared_in, is_best, rates_in, rating_in, sets_rate
from cluster_ddp.train.own.watch.reported import Report
from cluster_ddp.train.own.watch.saved import Saved, how_to_keep

_DEPTH = 3  # a variable's value, its attributes, and what these hold
_NAMES = re.compile(r"\w+")


def watch_elsewhere(saved: Saved, report: Report) -> Iterator[None]:
    """Warn, after the second step, about numbers of the program that decide, and that no running function sets.

    Examples are ``if accuracy > self.best: self.best = accuracy`` in a method that is called after the batches, in the
    code of any class of the program's own with an object in its variables, and likewise with an item of a dict, a
    global variable, or one of the function around, which a callback sets; or ``self.calls += 1`` in an object that
    computes learning rates from it. Also about numbers that steps change so, if they are compared with others, such as
    the exploration rate of an agent. What a method sets to a literal number, as a meter's ``reset()`` does, is not
    reported.

    Parameters
    ----------
    saved
        What need not be checked.
    report
        Called with the message.
    """
    before = {found.name: found.value for found in found_or_nothing(_numbers(saved))}
    yield
    names = {
        found.name
        for found in found_or_nothing(_numbers(saved))
        if found.decides or (found.steers and before.get(found.name, found.value) != found.value)
    }
    if names:
        last = sorted({name.rpartition(".")[2].partition("[")[0] for name in names})
        report(
            f"the program depends on {', '.join(sorted(names))}, which no checkpoint contains: after a resume "
            "it starts over, and what it decides, such as a rate or the best model, differs. Keep it: "
            f"{how_to_keep(last[0])}; or give its object state_dict() and load_state_dict(), and pass it in",
            names,
        )


def _numbers(saved: Saved) -> Iterator[_Found]:
    held = saved.ids()
    holders = [(name, value) for name, value in reachable(_variables(), _DEPTH) if id(value) not in held]
    objects = [(name, value) for name, value in holders if _is_of_program(value)]
    running = {(frame.f_code.co_filename, frame.f_code.co_firstlineno) for frame in running_frames()}
    shared: dict[str, dict[str, Any]] = {}  # by file: what functions there can have as variables of others
    for frame in running_frames():
        shared.setdefault(frame.f_code.co_filename, {}).update({**frame.f_globals, **variables_of(frame)})
    sources = {file: source_of(file) for file in program_files(value for _, value in objects)}
    asked = {part for source in sources.values() for part in _asked_for_rates(source)}
    giving = [type(value) for name, value in objects if not asked.isdisjoint(_NAMES.findall(name)[-1:])]
    givers = frozenset(kind.__name__ for of_object in giving for kind in of_object.__mro__)
    for file, source in sources.items():
        for use in _uses_in(source, givers):
            if (file, use.line) in running:
                continue  # `watch_counts` looks at it
            for name, value in _values(use, objects, holders, shared.get(file, {})):
                yield _Found(name, value, use.decides, use.steers)


class _Found(NamedTuple):
    """A number, under the name by which the program holds it, and how it uses it."""

    name: str
    value: Any
    decides: bool
    steers: bool


class _Use(NamedTuple):
    """How a function uses an attribute, an item or a global variable."""

    name: str
    owner: str | None  # the class of `self`
    line: int  # of the function
    decides: bool  # it is compared with what it is then set to, or learning rates are computed from it
    steers: bool  # it is changed by its own value, and compared


def _variables() -> list[tuple[str, Any]]:
    """Those of the running functions, and of their modules."""
    return [*running_variables(), *(item for frame in running_frames() for item in list(frame.f_globals.items()))]


def _is_of_program(value: Any) -> bool:
    if isinstance(value, (Kept, nn.Module, type)) or not (is_own_class(type(value)) or type(value) is SimpleNamespace):
        return False
    is_framed = any(not is_own_class(kind) for kind in type(value).__mro__[:-1])
    saves_itself = any("state_dict" in vars(kind) for kind in type(value).__mro__ if is_own_class(kind))
    is_kept = any(kind.__module__.startswith("transformers.") for kind in type(value).__mro__)  # by `ResumeExactly`
    # Those for early stopping are reported by `watch_counts`.
    return not (is_early_stopper(value) or is_kept or (is_framed and saves_itself))


def _values(
    use: _Use, objects: list[tuple[str, Any]], holders: list[tuple[str, Any]], shared: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The numbers that a use may mean, by the name under which the program holds them."""
    if not is_held(use.name):
        if use.name in shared and is_number(shared[use.name]):
            yield use.name, shared[use.name]
        return
    if "[" in use.name:
        key = ast.literal_eval(use.name.rpartition("[")[2].removesuffix("]"))
        for name, value in holders:
            if type(value) is dict and is_number(value.get(key, "")):
                yield f"{name}[{key!r}]", value[key]
        return
    attribute = use.name.rpartition(".")[2]
    for name, value in objects:
        kinds = {kind.__name__ for kind in type(value).__mro__}
        if (use.owner is None or use.owner in kinds) and is_number(vars(value).get(attribute, "")):
            yield f"{name}.{attribute}", vars(value)[attribute]


@read_once
def _asked_for_rates(source: str) -> Iterator[str]:
    """The names of objects whose call, or method, gives what a function sets a learning rate to."""
    for function in (node for node in ast.walk(tree_of(source)) if isinstance(node, (ast.Module, *FUNCTIONS))):
        for call in (part for value in rates_in(with_parents(function)) for part in ast.walk(value)):
            if isinstance(call, ast.Call):
                yield from (name_of(call.func) or "").split(".")[-2:]


@read_once
def _uses_in(source: str, givers: Container[str]) -> Iterator[_Use]:
    """How its functions use numbers that may start over.

    Parameters
    ----------
    givers
        The names of classes whose objects give learning rates.
    """
    for owner in ast.walk(tree_of(source)):
        if isinstance(owner, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            functions = {node: with_parents(node) for node in with_parents(owner) if isinstance(node, FUNCTIONS)}
            of_class = owner.name if isinstance(owner, ast.ClassDef) else None
            reset = {name for function in functions if function.name != "__init__" for name in _reset_in(function)}
            compared = {name for parents in functions.values() for name in compared_in(parents)}
            if of_class is not None and any(
                map(sets_rate, (node for parents in functions.values() for node in parents))
            ):
                compared |= {name for parents in functions.values() for node in parents for name in assigned(node)}
            gives = of_class in givers
            rating = {name for parents in functions.values() for name in rating_in(parents, functions, gives=gives)}
            for function, parents in functions.items():
                for use in _uses_of(function, parents, of_class, compared, rating):
                    if use.name not in reset and not (is_held(use.name) and isinstance(owner, FUNCTIONS)):
                        yield use


def _reset_in(function: FunctionNode) -> set[str]:
    """What a function sets to a literal number whatever happens."""
    setting = (node for node in function.body if isinstance(node, ast.Assign) and begins_with_number(node))
    return {name for node in setting for name in assigned(node)}


def _uses_of(
    function: FunctionNode,
    parents: dict[ast.AST, ast.AST],
    owner: str | None,
    compared: set[str],
    rating: set[str],
) -> Iterator[_Use]:
    shared = {name for node in parents if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    setting = {node: names for node in parents if (names := assigned(node))}
    for name in sorted({name for names in setting.values() for name in names if is_held(name) or name in shared}):
        nodes = [node for node, names in setting.items() if name in names]
        if any(map(is_of_clock, nodes)):
            continue
        changes = any(name in built_on_itself(node) for node in nodes)
        decides = any(is_best(node, name, parents) for node in nodes) or (changes and name in rating)
        of_self = owner if name.startswith("self.") and name.count(".") == 1 else None
        if decides or (changes and name in compared):
            first = min(node.lineno for node in (function, *function.decorator_list))  # as the code object has it
            yield _Use(name, of_self, first, decides, changes and name in compared)
