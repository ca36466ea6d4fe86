"""Detects tensors that a custom loop carries from batch to batch in its variables, such as hidden states."""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable, Iterator
from types import CodeType

from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.program import running_frames, running_variables, variables_of
from cluster_ddp.train.own.values import differing, fingerprint_of, has_tensors
from cluster_ddp.train.own.watch.saved import how_to_keep

_ACCESS = re.compile("LOAD|STORE|DELETE")
_ENVIRONMENTS = {"Env", "VectorEnv"}
_ENDS = (
    "JUMP_FORWARD",
    "JUMP_ABSOLUTE",
    "JUMP_BACKWARD",
    "RETURN",
    "RAISE",
    "RERAISE",
)  # instructions after which the next one does not run


def watch_carried(kept: KeptValues, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about variables holding tensors that a batch reads before it sets them.

    An example is ``output, hidden = model(batch, hidden)``: such values come from the previous batch, and start over
    after a resume. What is made once, in the first batch, does not count. Numbers are not reported: nearly every loop
    has some that are only printed.

    Parameters
    ----------
    kept
        What the loop keeps with `ScriptRun.keep`; the loop may also use other names for it.
    warn
        Called with the message.
    """
    before = _carried_now(kept)
    yield
    now = _carried_now(kept)
    if names := differing(before, now):
        warn(
            f"the loop carries tensors from one batch to the next in {', '.join(names)}, which no "
            "checkpoint contains: a resume is exact only if no step depends on them. Keep them: "
            f"{how_to_keep(names[0], initial='None')}{_of_environments()}"
        )


def _carried_now(kept: KeptValues) -> dict[str, int]:
    """Fingerprints of these variables, by name."""
    found: dict[str, int] = {}
    with contextlib.suppress(Exception):  # an interpreter with a different bytecode
        for frame in running_frames():
            there = variables_of(frame)
            carried = {name: there.get(name) for name in _carried(frame.f_code, frame.f_lasti)}
            strange = {name: value for name, value in carried.items() if not kept.keeps(value)}
            found |= {name: fingerprint_of(value) for name, value in strange.items() if has_tensors(value)}
    return found


def _of_environments() -> str:
    """The part of the message about gymnasium environments, which continue from step to step as well."""
    found = {
        name
        for name, value in running_variables()
        if not _ENVIRONMENTS.isdisjoint(kind.__name__ for kind in type(value).__mro__)
    }
    if not found:
        return ""
    names = ", ".join(sorted(found))
    return (
        f". The state of {names} also starts over: begin each step with reset(), and with a seed from the step's "
        "number unless it draws from the global generators"
    )


def _carried(code: CodeType, at: int) -> list[str]:
    """The variables that the running for loop both reads before setting them in its body, and sets there."""
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
    """Whether there is a path through these instructions that reads the name before setting it."""
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
        if "JUMP" in opname or opname == "SEND":
            target = place[body[number].argval]
            # An inner loop is left only after a pass through it, as that over the parts of a batch is.
            todo.append(place[body[target].argval] if body[target].opname == "FOR_ITER" else target)
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
