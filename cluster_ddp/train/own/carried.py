"""Sees the tensors that a loop of one's own carries from batch to batch in its variables, such as hidden states."""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor

from cluster_ddp.train.own.program import running_frames, variables_of

_LOOKED_AT_AFTER = 2  # steps
_ACCESS = re.compile("LOAD|STORE|DELETE")
_ENDS = (
    "JUMP_FORWARD",
    "JUMP_ABSOLUTE",
    "JUMP_BACKWARD",
    "RETURN",
    "RAISE",
    "RERAISE",
)  # nothing runs on into the next


class Carried:
    """Tells, after the second step, of variables with tensors that a batch reads before it has set them.

    Such as ``output, hidden = model(batch, hidden)``: they come from the batch before, and start over at a resume.
    Numbers are not told: nearly every loop has some that are only printed.

    Parameters
    ----------
    tell
        Takes the message.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._steps = 0

    def check(self) -> None:
        """Call after each step, from within the iterator that the loop asks for its next batch."""
        self._steps += 1
        if self._steps != _LOOKED_AT_AFTER:
            return
        names: list[str] = []
        with contextlib.suppress(Exception):  # of an interpreter that writes its code in another way
            for frame in running_frames():
                there = variables_of(frame)
                names += [name for name in _carried(frame.f_code, frame.f_lasti) if _has_tensors(there.get(name))]
        if names:
            self._tell(
                f"the loop carries tensors from one batch to the next in {', '.join(sorted(names))}, which no "
                "checkpoint holds: a resume is exact only where no step depends on them. Keep them: "
                f"kept = run.keep({names[0]}=None), and read and set kept.{names[0]} in the loop"
            )


def _carried(code: CodeType, at: int) -> list[str]:
    """The variables that the body of the for loop whose iterator runs reads before it sets them, and sets."""
    body = list(dis.get_instructions(code))
    place = {instruction.offset: number for number, instruction in enumerate(body)}
    head = place.get(at, -1)
    if head < 0 or body[head].opname != "FOR_ITER":
        return []
    end = place[body[head].argval]
    accesses = [list(_accesses(instruction)) for instruction in body]
    stored = {name for of_one in accesses[head + 1 : end] for kind, name in of_one if kind == "STORE"}
    return [name for name in sorted(stored) if _is_read_first(name, body, place, accesses, range(head + 1, end))]


def _is_read_first(
    name: str,
    body: list[dis.Instruction],
    place: dict[int, int],
    accesses: list[list[tuple[str, str]]],
    within: range,
) -> bool:
    """Whether there is a way through these instructions on which the name is read before it is set."""
    todo, seen = [within.start], set()
    while todo:
        number = todo.pop()
        if number in seen or number not in within:
            continue
        seen.add(number)
        first = next((kind for kind, accessed in accesses[number] if accessed == name), None)
        if first == "LOAD":
            return True
        if first is not None:
            continue
        opname = body[number].opname
        if "JUMP" in opname or opname in ("FOR_ITER", "SEND"):
            todo.append(place[body[number].argval])
        if not opname.startswith(_ENDS):
            todo.append(number + 1)
    return False


def _accesses(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    """What an instruction does with variables, in order: (LOAD, STORE or DELETE, name)."""
    opname = instruction.opname
    if not any(kind in opname for kind in ("_FAST", "_NAME", "_GLOBAL", "_DEREF")):
        return
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    kinds = ["DELETE"] if opname.endswith("AND_CLEAR") else _ACCESS.findall(opname)
    yield from zip(kinds, names, strict=False)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, np.ndarray):
        return value.size > 1
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(_has_tensors, value))
