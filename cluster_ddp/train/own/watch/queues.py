"""Detects queues of tensors that the steps of a custom loop fill, such as a replay buffer."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

from cluster_ddp.train.own.kept import KeptNumbers
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import found_or_nothing, reachable, running_variables
from cluster_ddp.train.own.values import has_tensors

_Queue = collections.deque[Any] | list[Any]

_ATTRIBUTE = re.compile(r"\.[a-z]\w*$")  # a public attribute of an object, from the end of its name
_DEPTH = 3  # a variable's value, its attributes, and what these hold
_DEPTH_OF_PASSED_IN = 4


class Queues:
    """Warns, after the second step, about queues that steps fill with tensors or arrays and no checkpoint contains.

    These are any `deque`, and any list in an attribute of an object, such as the images of a pool. Queues of numbers
    are not reported: they are mostly losses to print. Nor are lists in variables, in which a loop collects what it
    evaluates later.

    Parameters
    ----------
    passed_in
        What was passed in; what it holds is saved.
    kept
        What the loop keeps with `ScriptRun.keep`.
    warn
        Called with the message.
    """

    def __init__(self, passed_in: PassedIn, kept: KeptNumbers, warn: Callable[[str], None]) -> None:
        self._passed_in, self._kept, self._warn = passed_in, kept, warn
        self._before: list[tuple[_Queue, tuple[int, int]]] = []

    def first(self) -> None:
        """Call after the first step."""
        self._before = [(queue, _end_of(queue)) for _, queue in self._found()]

    def second(self) -> None:
        """Call after the second step."""
        before, self._before = self._before, []
        filled = {id(queue) for queue, end in before if _end_of(queue) != end}
        if names := sorted(name for name, queue in self._found() if id(queue) in filled):
            self._warn(
                f"steps put tensors into {', '.join(names)}, which no checkpoint contains: a resume starts with "
                "whatever the program puts there before the loop, and is exact only if no step depends on it. Keep "
                "it, for example with kept = run.keep(memory=deque(maxlen=10000)), and use kept.memory in the loop; "
                "keep a list that an object fills in place with run.keep(images=pool.images) before the loop"
            )

    def _found(self) -> list[tuple[str, _Queue]]:
        return found_or_nothing(self._of_the_loop())

    def _of_the_loop(self) -> Iterator[tuple[str, _Queue]]:
        passed_in = [("", thing) for thing in (*self._passed_in.optimizers, *self._passed_in.others.values())]
        held = {id(part) for _, part in (*reachable(passed_in, _DEPTH_OF_PASSED_IN), *self._kept.values.items())}
        for name, found in reachable(running_variables(), _DEPTH):
            if _is_queue(name, found) and found and has_tensors(found[-1]) and id(found) not in held:
                yield name, found


def _is_queue(name: str, found: Any) -> bool:
    return type(found) is collections.deque or (type(found) is list and _ATTRIBUTE.search(name) is not None)


def _end_of(queue: _Queue) -> tuple[int, int]:
    return len(queue), id(queue[-1])
