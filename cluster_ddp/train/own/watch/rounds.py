"""Detects loops that take one batch after another from a generator or an iterator, and count them themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from cluster_ddp.train.objects.syntax import assigned, begins_with_number, below, counted, name_of
from cluster_ddp.train.own.watch.bodies import Text, in_running, value_of
from cluster_ddp.train.own.watch.reported import Report
from cluster_ddp.train.own.watch.saved import Saved

_RANGES = {"range", "trange", "count"}
_WRAPPERS = {"tqdm", "track"}
_LOOKS = 2  # steps after which an attempt that began with none has been looked at


class _Round(NamedTuple):
    """The number of a round of a running loop."""

    code: CodeType  # of the function that runs it
    name: str
    value: int
    starts_over: bool  # as its source shows; else its start is computed


def watch_rounds(step: Callable[[], int], report: Report, passed_in: Iterable[Any] = ()) -> Iterator[None]:
    """Warn, after the second step, about a loop whose own rounds take the batches, as they start over after a resume.

    Examples are ``for step in range(steps): batch = next(batches)``, and ``while step < steps:`` with ``step += 1``,
    where a generator gives the batches of all epochs. A loop that begins at `ScriptRun.step`, or at a number computed
    from it, is not reported.

    Parameters
    ----------
    step
        Returns the number of finished steps.
    report
        Called with the message.
    passed_in
        The objects passed in; a number in an attribute of one does not start over.
    """
    saved = Saved(list(passed_in))
    before = {(found.code, found.name): found.value for found in _running(step(), saved)}
    yield
    is_resumed = step() > _LOOKS  # so that the number itself shows whether it has started over
    for found in _running(step(), saved):
        has_moved = before.get((found.code, found.name), found.value) != found.value
        if has_moved and (found.value + 1 < step() or (found.starts_over and not is_resumed)):
            report(
                f"the loop counts its batches in {found.name}, which starts over after a resume: it would then train "
                "on more batches than without it. Begin with the finished steps, which run.step gives once resumable() "
                f"or steps() has been called: `for {found.name.rpartition('.')[2]} in range(run.step, ...)`, or while "
                "run.step < ...",
                [found.name],
            )
            return


def begins_at_place(step: int) -> bool:
    """Whether a running loop goes over numbers from `ScriptRun.step` on, as ``range(run.step % n, n)``."""

    def found(text: Text, frame: FrameType) -> Iterator[bool]:
        iterables = (_numbers_of(loop.iter) for loop in text.loops if isinstance(loop, ast.For))
        yield from (_is_from(step, numbers, frame) for numbers in iterables if numbers is not None)

    return any(in_running(found))


def _running(step: int, saved: Saved) -> Iterator[_Round]:
    def found(text: Text, frame: FrameType) -> Iterator[_Round]:
        rounds = _rounds_of(text, frame, step)
        yield from (each for each in rounds if not saved.has_named(each.name, frame))

    return in_running(found)


def _rounds_of(text: Text, frame: FrameType, step: int) -> Iterator[_Round]:
    for loop in text.loops:
        if isinstance(loop, ast.For):
            numbers = _numbers_of(loop.iter)
            if numbers is None or _is_from(step, numbers, frame):
                continue
            found = [(name_of(loop.target), _starts_over(numbers))]
        else:
            tested = {name_of(node) for node in ast.walk(loop.test)}
            names = [name for node in below(loop, text.parents) if (name := counted(node)) in tested]
            found = [(name, _begins_with_number(name, text)) for name in names]
        for name, starts_over in found:
            value = None if name is None else value_of(name, frame)
            if name is not None and type(value) is int:
                yield _Round(frame.f_code, name, value, starts_over)


def _begins_with_number(name: str | None, text: Text) -> bool:
    """Whether a running function sets a variable that it counts to nothing but literal numbers."""
    nodes = (node for node in text.parents if name in assigned(node) and counted(node) is None)
    return all(begins_with_number(node, name) for node in nodes)


def _numbers_of(iterable: ast.expr) -> ast.Call | None:
    """The call that makes the numbers over which a loop goes, even with a progress bar around them."""
    if not isinstance(iterable, ast.Call):
        return None
    name = (name_of(iterable.func) or "").rpartition(".")[2]
    if name in _WRAPPERS and iterable.args:
        return _numbers_of(iterable.args[0])
    return iterable if name in _RANGES else None


def _is_from(step: int, numbers: ast.Call, frame: FrameType) -> bool:
    """Whether their start is computed from an attribute `step` that is the number of finished steps."""
    parts = ast.walk(numbers.args[0]) if len(numbers.args) > 1 else ()
    names = (name_of(part) for part in parts if isinstance(part, ast.Attribute) and part.attr == "step")
    return any(name is not None and value_of(name, frame) == step for name in names)


def _starts_over(numbers: ast.Call) -> bool:
    """Whether they start at a literal number."""
    is_count = (name_of(numbers.func) or "").endswith("count")
    if len(numbers.args) < (1 if is_count else 2):
        return True
    return isinstance(numbers.args[0], ast.Constant)
