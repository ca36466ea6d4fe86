"""Detects loops that take one batch after another from a generator or an iterator, and count them themselves."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from cluster_ddp.train.own.program import running_frames
from cluster_ddp.train.own.watch.syntax import (
    LIBRARIES,
    Text,
    below,
    counted,
    name_of,
    text_of,
    value_of,
)

_RANGES = {"range", "trange", "count"}
_WRAPPERS = {"tqdm", "track"}


class _Round(NamedTuple):
    """The number of a round of a running loop."""

    name: str
    value: int
    starts_over: bool  # as its source shows; else its start is computed


class Rounds:
    """Warns, after the second step, about a loop whose own rounds take the batches, as they start over after a resume.

    As in ``for step in range(steps): batch = next(batches)``, or in ``while step < steps:`` with ``step += 1``, where a
    generator gives the batches of all epochs. A loop that begins at `ScriptRun.step` is not reported.

    Parameters
    ----------
    step
        Returns the number of finished steps.
    warn
        Called with the message.
    """

    def __init__(self, step: Callable[[], int], warn: Callable[[str], None]) -> None:
        self._step, self._warn = step, warn
        self._before: dict[tuple[Any, str], int] = {}

    def first(self) -> None:
        """Call after the first step."""
        self._before = {key: found.value for key, found in _running()}

    def second(self) -> None:
        """Call after the second step."""
        before, self._before = self._before, {}
        for (code, name), found in _running():
            has_moved = before.get((code, name), found.value) != found.value
            if has_moved and (found.starts_over or found.value + 1 < self._step()):
                self._warn(
                    f"the loop counts its batches in {name}, which starts over after a resume: it would then train on "
                    "more batches than without it. Begin with the finished steps, which run.step gives once "
                    f"resumable() or steps() has been called: `for {name.rpartition('.')[2]} in range(run.step, ...)`, "
                    "or while run.step < ..."
                )
                return


def _running() -> Iterator[tuple[tuple[Any, str], _Round]]:
    for frame in running_frames():
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            with contextlib.suppress(Exception):  # there is no source, or its lines have moved
                for found in _rounds_of(text_of(frame), frame):
                    yield (frame.f_code, found.name), found


def _rounds_of(text: Text, frame: FrameType) -> Iterator[_Round]:
    for loop in text.loops:
        if isinstance(loop, ast.For):
            numbers = _numbers_of(loop.iter)
            found = [] if numbers is None else [(name_of(loop.target), _starts_over(numbers))]
        else:
            tested = {name_of(node) for node in ast.walk(loop.test)}
            found = [(name, True) for node in below(loop, text.parents) if (name := counted(node)) in tested]
        for name, starts_over in found:
            value = None if name is None else value_of(name, frame)
            if name is not None and type(value) is int:
                yield _Round(name, value, starts_over)


def _numbers_of(iterable: ast.expr) -> ast.Call | None:
    """The call that makes the numbers over which a loop goes, even with a progress bar around them."""
    if not isinstance(iterable, ast.Call):
        return None
    name = (name_of(iterable.func) or "").rpartition(".")[2]
    if name in _WRAPPERS and iterable.args:
        return _numbers_of(iterable.args[0])
    return iterable if name in _RANGES else None


def _starts_over(numbers: ast.Call) -> bool:
    """Whether they start at a literal number."""
    is_count = (name_of(numbers.func) or "").endswith("count")
    if len(numbers.args) < (1 if is_count else 2):
        return True
    return isinstance(numbers.args[0], ast.Constant)
