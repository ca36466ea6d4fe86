"""Compares values that are kept in attributes, and those that come back from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster_ddp.checkpoint.replicas import INTEGERS
from cluster_ddp.train.state.kinds import is_plain
from cluster_ddp.train.state.plain import is_device

_WIDTH = 100  # how many elements of lists are looked at one by one


class Place:
    """The unknown position of an iterator: it equals no other, so it always counts as changed."""

    def __repr__(self) -> str:
        return "somewhere"


def equal_bits(was: Tensor, now: Tensor) -> bool:
    """Whether two tensors, on any devices, have the same dtype, shape and bits; NaN equals itself."""
    if was.is_nested or now.is_nested or (was.dtype, was.shape, was.layout) != (now.dtype, now.shape, now.layout):
        return was is now
    if was.is_quantized:  # torch cannot view these as integers: it crashes
        return torch.equal(was, now)
    if was.layout is not torch.strided:
        was, now = was.to_dense(), now.to_dense()
    parts = [
        torch.view_as_real(part) if part.is_complex() else part for part in (was.detach().cpu(), now.detach().cpu())
    ]
    kind = INTEGERS[parts[0].element_size()]
    return torch.equal(parts[0].view(kind), parts[1].view(kind))


def is_same(was: Any, now: Any) -> bool:
    """Whether two leaves have the same value; tensors must be the same object."""
    if isinstance(was, (Tensor, Place)) or isinstance(now, (Tensor, Place)):
        return was is now
    return was is now or (type(was) is type(now) and repr(was) == repr(now))


def difference(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """How a leaf differs from the one of this name after a resume; None if it does not."""
    was, now = mine.get(name), theirs.get(name)
    if name not in theirs or name not in mine:
        if any(isinstance(value, Tensor) or type(value) in (int, float) for value in (was, now)):
            return "does not come back" if name in mine else "comes back though it was not there"
    elif isinstance(was, Tensor) and isinstance(now, Tensor):
        if not equal_bits(was, now):
            return "other values come back"
    elif not is_same(was, now) and not (is_device(was) and is_device(now)):  # the comparison is made on the CPU
        return f"{_short(was)} now, {_short(now)} after a resume"
    return None


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def other_forms(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What tensors and lists in the state of a task may have been made from, by name: arrays, numbers and sets."""
    if isinstance(state, dict):
        for key, part in state.items():
            yield from other_forms(part, f"{name}.{key}".removeprefix("."))
        return
    with contextlib.suppress(Exception):  # such as a tensor in bfloat16
        if isinstance(state, Tensor):
            yield name, state.numpy(force=True)
            yield f"{name}, its number", state.item()
    if isinstance(state, (list, tuple)):
        parts = [tuple(part) if type(part) is list else part for part in state]
        if all(map(is_plain, parts)):
            yield f"{name}, as a set", frozenset(parts)
        array = None
        with contextlib.suppress(Exception):  # such as a list of lists of different lengths
            array = np.asarray(state)
        if array is not None and array.dtype != object:
            yield name, array
        else:
            for number, part in enumerate(islice(state, _WIDTH)):
                yield from other_forms(part, f"{name}.{number}")
