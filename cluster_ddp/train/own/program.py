"""What the program around a loop of its own holds: the functions that run, and what they can reach."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch.utils.data as torch_data
from torch import Tensor, nn

from cluster_ddp.train.inner_parts import inner_parts

_CLOSED = (Tensor, nn.Module, np.ndarray, type, ModuleType, torch_data.Dataset, torch_data.DataLoader, str, int, float)
_Found = TypeVar("_Found")
_OURS = __name__.partition(".")[0]
_WIDTH = 2000  # parts of a list or dict that are looked through
_MOST = 50_000  # parts of one depth: 0.1 s


def running_frames() -> Iterator[FrameType]:
    """The functions that run now, from the inside, without those of this package and of torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (_OURS, "torch"):
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function by name, without letting the frame hold on to what they are now.

    Before Python 3.13 a function that is asked for its variables keeps a dict of them to its end: a batch, its logits.
    """
    found = dict(frame.f_locals)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()
    return found


def running_variables() -> list[tuple[str, Any]]:
    """The variables of all functions that run now, by name."""
    return [item for frame in running_frames() for item in variables_of(frame).items()]


def found_or_nothing(search: Iterator[_Found]) -> list[_Found]:
    """What a search through a program finds; nothing where a proxy fails, which does much when asked what it is."""
    with contextlib.suppress(Exception):
        return list(search)
    return []


def reachable(holders: Iterable[tuple[str, Any]], depth: int) -> Iterator[tuple[str, Any]]:
    """What objects hold in attributes, lists and dicts, by a name for people, and they themselves.

    Models, tensors, arrays, data sets and what is this package's own, such as `ScriptRun.keep` gives, are not looked
    into.

    Parameters
    ----------
    depth
        How deep.
    """
    seen: set[int] = set()
    level = list(holders)
    for _ in range(depth):
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value
                if len(inner) < _MOST:
                    inner += _parts(name, value)
        level = inner


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if len(value) <= _WIDTH:
            yield from ((f"{name}[{_name_of(key)}]", part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple)):
        if len(value) <= _WIDTH:
            yield from ((f"{name}[{number}]", part) for number, part in enumerate(list(value)))
    elif not isinstance(value, _CLOSED) and type(value).__module__.partition(".")[0] != _OURS:
        yield from ((f"{name}.{part}", held) for part, held in inner_parts(value))


def _name_of(key: Any) -> str:
    """Of a key in a dict; a tensor's own representation takes long."""
    return repr(key) if isinstance(key, (str, int, float)) else type(key).__name__
