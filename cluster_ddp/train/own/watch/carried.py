"""Detects tensors that a custom loop carries from batch to batch in its variables, such as hidden states."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

from cluster_ddp.train.objects.live_variables import is_read_first, names_read
from cluster_ddp.train.objects.syntax import assigned, below, nodes_around
from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.program import running_variables, variables_of
from cluster_ddp.train.own.values import differing, fingerprint_of, has_tensors
from cluster_ddp.train.own.watch.bodies import Text, in_running
from cluster_ddp.train.own.watch.reported import Report
from cluster_ddp.train.own.watch.saved import how_to_keep

_ENVIRONMENTS = {"Env", "VectorEnv"}


def watch_carried(kept: KeptValues, report: Report) -> Iterator[None]:
    """Warn, after the second step, about variables holding tensors that a batch reads before it sets them.

    An example is ``output, hidden = model(batch, hidden)``: such values come from the previous batch, and start over
    after a resume. What is made once, in the first batch, does not count. Numbers are not reported: nearly every loop
    has some that are only printed.

    Parameters
    ----------
    kept
        What the loop keeps with `ScriptRun.keep`; the loop may also use other names for it.
    report
        Called with the message.
    """
    before = _carried_now(kept)
    yield
    now = _carried_now(kept)
    if names := differing(before, now):
        report(
            f"the loop carries tensors from one batch to the next in {', '.join(names)}, which no "
            "checkpoint contains: a resume is exact only if no step depends on them. Keep them: "
            f"{how_to_keep(names[0], initial='None')}{_of_environments()}",
            names,
        )


def _carried_now(kept: KeptValues) -> dict[str, int]:
    """Fingerprints of these variables, by name."""

    def found(text: Text, frame: FrameType) -> Iterator[tuple[str, int]]:
        loop = text.loops[-1] if text.loops else None
        if not isinstance(loop, ast.For) or frame.f_lineno > (loop.iter.end_lineno or 0):
            return  # it does not take its next item now
        inside, there = list(below(loop, text.parents)), variables_of(frame)
        statements = (node for node in inside if isinstance(node, ast.stmt))
        uses = names_read(node for node in statements if not _handles_error(node, text))  # which is rare
        stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for name in stored - assigned(loop):
            value = there.get(name)
            if has_tensors(value) and not kept.keeps(value) and is_read_first(loop.body, name, uses):
                yield name, fingerprint_of(value)

    return dict(in_running(found))


def _handles_error(node: ast.stmt, text: Text) -> bool:
    return any(isinstance(around, ast.ExceptHandler) for around in nodes_around(node, text.parents))


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
