"""Detects what code before the batches of an epoch computes from the model, which a resume there computes again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from cluster_ddp.train.objects.syntax import assigned, name_of
from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.values import addresses, has_tensors, tensors_in
from cluster_ddp.train.own.watch.bodies import Text, in_running, value_or_none
from cluster_ddp.train.own.watch.reported import Report
from cluster_ddp.train.own.watch.saved import Saved


def watch_before_batches(passed_in: PassedIn, kept: KeptValues, report: Report) -> Iterator[None]:
    """Warn, after the second step, about what each epoch computes from the model before its batches, which use it.

    Examples are a copy of the model for SVRG, or labels for the samples by clustering their features. When an epoch is
    resumed in the middle, that code runs again, with other weights than at the beginning of the epoch. Only tensors,
    arrays, modules and data sets count, unless they are passed in or kept, since these are restored after that code.

    Parameters
    ----------
    passed_in
        What was passed in.
    kept
        What the loop keeps with `ScriptRun.keep`.
    report
        Called with the message.
    """
    yield
    saved = Saved([passed_in.model, *passed_in.others.values()], kept)
    memory = _Memory(addresses((*passed_in.tensors(), *kept.tensors())), saved)
    if names := set(in_running(memory.computed_in)):
        report(
            f"the code before the batches of an epoch computes {', '.join(sorted(names))} from the model: a resume "
            "within the epoch computes that again, from other weights, and is exact only if no step depends on it. "
            "Compute it after the batches instead, and once before the loop, in what run.keep() keeps "
            "(kept = run.keep(labels=...)) or in a module that is passed in",
            names,
        )


class _Memory:
    """Where the tensors are that are saved, and what else is."""

    def __init__(self, held: set[int], saved: Saved) -> None:
        self._held, self._saved = held, saved

    def computed_in(self, text: Text, frame: FrameType) -> Iterator[str]:
        """What the code before the batches computes from what is trained, and does not come back."""
        loops = (loop for loop in text.loops if isinstance(loop, ast.For))
        for loop in loops:
            if not (isinstance(loop.iter, ast.Call) and (name_of(loop.iter.func) or "").endswith(".epochs")):
                continue
            running = next(part for part in loop.body if part.lineno <= frame.f_lineno <= (part.end_lineno or 0))
            read = {name_of(node) for node in ast.walk(running)}
            computed: set[str] = set()
            for statement in loop.body[: loop.body.index(running)]:
                for names, value in _setting(statement):
                    parts = list(ast.walk(value))
                    if any(name_of(part) in computed or self._is_trained(part, frame) for part in parts):
                        computed |= {name for name in names if not isinstance(value_or_none(name, frame), ModuleType)}
                        yield from (name for name in names if self._is_lost(name, frame, is_read=name in read))

    def _is_trained(self, node: ast.AST, frame: FrameType) -> bool:
        found = value_or_none(name_of(node) or "", frame)
        return isinstance(found, nn.Module) and self._shares(found)

    def _is_lost(self, name: str, frame: FrameType, *, is_read: bool) -> bool:
        owner = name.rpartition(".")[0]
        if isinstance(value_or_none(owner or name, frame), Dataset):
            return True  # the batches are read from it
        found = value_or_none(name, frame)
        if not is_read or self._saved.has_named(name, frame):
            return False
        return (isinstance(found, nn.Module) or has_tensors(found)) and not self._shares(found)

    def _shares(self, found: Any) -> bool:
        """Whether this is, or has, a tensor that is saved."""
        tensors = (*found.parameters(), *found.buffers()) if isinstance(found, nn.Module) else tensors_in(found)
        return not self._held.isdisjoint(addresses(tensors))


def _setting(statement: ast.stmt) -> Iterator[tuple[set[str], ast.AST]]:
    """What assignments set, and the objects of which methods are called for their effect; each with what goes in."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign):
            yield assigned(node), node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            owner = name_of(getattr(node.value.func, "value", ast.Constant(None)))
            arguments: list[ast.expr] = [*node.value.args, *(word.value for word in node.value.keywords)]
            yield {owner} if owner else set(), ast.Tuple(arguments, ast.Load())
