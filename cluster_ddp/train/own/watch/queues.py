"""Detects queues of tensors that the steps of a custom loop fill, such as a replay buffer."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.objects.attributes import last_part
from cluster_ddp.train.objects.syntax import name_of
from cluster_ddp.train.objects.whose_code import is_own_class
from cluster_ddp.train.own.kept import Kept, KeptValues
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import found_or_nothing, reachable, running_frames, running_variables, variables_of
from cluster_ddp.train.own.values import fingerprint_of, has_tensors
from cluster_ddp.train.own.watch.bodies import program_files, read_once, source_of, tree_of
from cluster_ddp.train.own.watch.reported import Report
from cluster_ddp.train.own.watch.saved import Saved
from cluster_ddp.train.state.set_before_read import is_only_read_where_set

_ARRAYS = (np.ndarray, Tensor)
_FILLED = (list, collections.deque, *_ARRAYS)
_Queue = collections.deque[Any] | list[Any]

_DRAWS = {"sample", "choice", "choices"}
_ATTRIBUTE = re.compile(r"\.[a-z]\w*$")  # a public attribute of an object, from the end of its name
_DEPTH = 3  # a variable's value, its attributes, and what these hold


def watch_queues(passed_in: PassedIn, kept: KeptValues, report: Report) -> Iterator[None]:
    """Warn, after the second step, about queues that steps fill with tensors or arrays and no checkpoint contains.

    These are any `deque`, any list in an attribute of an object, such as the images of a pool, and any list from which
    the program draws, as in ``random.sample(memory, 32)``. Queues of numbers are not reported: they are mostly losses
    to print. Nor are other lists in variables, in which a loop collects what it evaluates later, nor one that each step
    empties before it fills it, as for the features of hooks.

    Also reported are arrays and tensors in an object that fills them row by row, with the next row in a number beside
    them, and numbers that steps change beside what the loop keeps, such as the count of images in a pool, or beside an
    average that was passed in without the object that counts its updates.

    Parameters
    ----------
    passed_in
        What was passed in; what it holds is saved.
    kept
        What the loop keeps with `ScriptRun.keep`.
    report
        Called with the message.
    """
    # Lists that were empty before the first step; kept alive, so that their ids are not reused.
    variables = found_or_nothing(reachable(running_variables(), _DEPTH))
    saved = Saved([*passed_in.optimizers, *passed_in.others.values()], kept)
    return _watch(saved, report, [found for _, found in variables if type(found) is list and not found])


def _watch(saved: Saved, report: Report, empty: Sequence[list[Any]]) -> Iterator[None]:
    before = [(queue, _end_of(queue)) for _, queue in found_or_nothing(_queues(saved))]
    rows = found_or_nothing(_next_rows(saved))
    beside = dict(found_or_nothing(_beside_kept(saved)))
    yield
    filled = {id(queue): len(queue) == end[0] for queue, end in before if _end_of(queue) != end}
    emptied = {id(queue) for queue in empty if filled.get(id(queue))}
    queues = {
        name
        for name, queue in found_or_nothing(_queues(saved))
        if id(queue) in filled
        and not (id(queue) in emptied and is_only_read_where_set(last_part(name), is_container=True))
    }
    arrays = {f"{name}.{array}" for name, holder, array, key, row in rows if _is_filled(holder, array, key, row)}
    if names := sorted(queues | arrays):
        report(
            f"steps put tensors into {', '.join(names)}, which no checkpoint contains: a resume starts with "
            "whatever the program puts there before the loop, and is exact only if no step depends on it. Keep "
            "it, for example with kept = run.keep(memory=deque(maxlen=10000)), and use kept.memory in the loop; "
            "keep a list that an object fills in place with run.keep(images=pool.images) before the loop. An "
            "object that counts what it holds needs state_dict() and load_state_dict(): pass it in (memory=buffer)",
            names,
        )
    now = found_or_nothing(_beside_kept(saved))
    if names := sorted(name for name, number in now if beside.get(name, number) != number):
        report(
            f"steps change {', '.join(names)}, which no checkpoint contains, in an object of which other "
            "contents are kept or passed in: after a resume they would not match. Give the object state_dict() and "
            "load_state_dict() that hold all of it, and pass it in (pool=pool, ema=ema) instead",
            names,
        )


def _holders(saved: Saved) -> Iterator[tuple[str, Any, dict[str, int]]]:
    """The objects in the program's variables that were not passed in, and the integers in their attributes."""
    held = saved.ids()
    for name, found in reachable(running_variables(), _DEPTH):
        kind = type(found)
        if id(found) in held or kind.__module__.partition(".")[0] == "torch":  # some of torch's warn when looked at
            continue
        if hasattr(found, "__dict__") and not issubclass(kind, (Kept, nn.Module, type, ModuleType)):
            yield name, found, {key: value for key, value in list(vars(found).items()) if type(value) is int}


def _beside_kept(saved: Saved) -> Iterator[tuple[str, int]]:
    filled = {id(value) for value in saved.kept.values.values() if isinstance(value, _FILLED)}
    averages = {id(thing) for thing in saved.things if isinstance(thing, nn.Module)}
    running_selves = {id(variables_of(frame).get("self")) for frame in running_frames()}
    for name, found, numbers in _holders(saved):
        held = list(vars(found).values())
        is_framework = not all(map(is_own_class, type(found).__mro__[:-1]))  # it may save the number itself
        trains = id(found) in running_selves or any(isinstance(value, Optimizer) for value in held)
        averaging = set() if is_framework or trains else averages
        if not (filled | averaging).isdisjoint(map(id, held)):
            yield from ((f"{name}.{key}", value) for key, value in numbers.items())


def _next_rows(saved: Saved) -> Iterator[tuple[str, Any, str, str, tuple[int, int, int]]]:
    """The arrays in an object beside a number that may be their next row, with what is in this row and the last."""
    for name, found, numbers in _holders(saved):
        for array, value in list(vars(found).items()):
            if isinstance(value, _ARRAYS) and value.ndim and not saved.kept.keeps(value):
                for key, row in numbers.items():
                    if 0 < row < len(value):
                        rows = fingerprint_of(value[row : row + 1]), fingerprint_of(value[row - 1 : row])
                        yield name, found, array, key, (row, *rows)


def _queues(saved: Saved) -> Iterator[tuple[str, _Queue]]:
    held = saved.ids()
    drawn_from = {name for file in program_files([]) for name in _drawn_from(source_of(file))}
    for name, found in reachable(running_variables(), _DEPTH):
        if _is_queue(name, found, drawn_from) and found and has_tensors(found[-1]) and id(found) not in held:
            yield name, found


def _is_queue(name: str, found: Any, drawn_from: set[str]) -> bool:
    is_list = type(found) is list and (name in drawn_from or _ATTRIBUTE.search(name) is not None)
    return is_list or type(found) is collections.deque


@read_once
def _drawn_from(source: str) -> Iterator[str]:
    """The variables from which any function of a file draws."""
    calls = (node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call))
    drawing = (call for call in calls if call.args and (name_of(call.func) or "").rpartition(".")[2] in _DRAWS)
    yield from (name for call in drawing if (name := name_of(call.args[0])) is not None)


def _is_filled(holder: Any, array: str, key: str, before: tuple[int, int, int]) -> bool:
    """Whether the row that was next has been written since, that before it has not, and the number has moved on."""
    row, following, last = before
    now, place = getattr(holder, array, None), getattr(holder, key, None)
    return (
        type(place) is int
        and place > row
        and isinstance(now, _ARRAYS)
        and now.ndim > 0
        and len(now) > row
        and fingerprint_of(now[row : row + 1]) != following
        and fingerprint_of(now[row - 1 : row]) == last
    )


def _end_of(queue: _Queue) -> tuple[int, int]:
    return len(queue), id(queue[-1]) if queue else 0
