"""Detects generators and readers that track a position in the data, in a loop that samples its batches itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import torch.utils.data as torch_data
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.program import found_or_nothing, reachable, running_variables
from cluster_ddp.train.own.watch.reported import Report

_TORCH = str(Path(torch_data.__file__).parents[2])
_DEPTH = 2  # a variable's value, and its attributes
_GIVES = ("__next__", "next_batch")
_TOLD_ELSEWHERE = (nn.Module, torch_data.DataLoader, _BaseDataLoaderIter)  # see watch_other_loaders


def watch_sources(kept: KeptValues, report: Report) -> Iterator[None]:
    """Warn, after the second step, about generators and readers from which a `run.steps` loop takes its batches.

    Examples are ``train_loader.next_batch()``, which tracks its position, and ``next(batches)``: they start over after
    a resume. A reader whose changing numbers are all kept is not reported.

    Parameters
    ----------
    kept
        What the loop keeps with `ScriptRun.keep`.
    report
        Called with the message.
    """
    # The sources are kept alive, so that their ids are not reused.
    before = {id(source): (source, _place(source)) for _, source in found_or_nothing(_sources())}
    yield
    numbers = {value for value in kept.values.values() if type(value) is int}
    moved: list[str] = []
    for name, source in found_or_nothing(_sources()):
        _, was = before.get(id(source), (None, {}))
        changed = [value for key, value in _place(source).items() if was.get(key, value) != value]
        if not numbers.issuperset(changed):
            moved.append(name)
    if moved:
        report(
            f"steps take batches from {', '.join(sorted(moved))}, whose position in the data no checkpoint "
            "contains: it starts over after a resume, which is exact only if the program moves it to the position "
            "of run.step. Keep the position: kept = run.keep(position=0), set kept.position after each batch, and "
            "start from it; or derive the batch from the number of the step or from random numbers, which are "
            "seeded for each step",
            moved,
        )


def _sources() -> Iterator[tuple[str, Any]]:
    for name, found in reachable(running_variables(), _DEPTH):
        if isinstance(found, GeneratorType):
            is_torch_s = found.gi_code.co_filename.startswith(_TORCH)  # as in the iterator of a DataLoader
            if not (found.gi_running or is_torch_s) and not any(
                isinstance(part, _TOLD_ELSEWHERE) for part in _held(found)
            ):
                yield name, found
        elif any(hasattr(type(found), method) for method in _GIVES) and not isinstance(found, _TOLD_ELSEWHERE):
            yield name, found


def _held(generator: GeneratorType[Any, Any, Any]) -> list[Any]:
    return [] if generator.gi_frame is None else list(generator.gi_frame.f_locals.values())


def _place(source: Any) -> dict[str, Any]:
    """The state that shows a source's position: the integers in a reader, all variables of a generator."""
    if isinstance(source, GeneratorType):
        variables = {} if source.gi_frame is None else dict(source.gi_frame.f_locals)
        return {name: value if type(value) is int else id(value) for name, value in variables.items()}
    return {name: value for name, value in getattr(source, "__dict__", {}).items() if type(value) is int}
