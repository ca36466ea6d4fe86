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
from cluster_ddp.train.objects.kinds import is_plain
from cluster_ddp.train.objects.plain import is_device

_WIDTH = 100  # how many elements of lists are looked at one by one


class Place:
    """The unknown position of an iterator: it equals no other, so it always counts as changed."""

    def __repr__(self) -> str:
        return "somewhere"


def equal_bits(was: Tensor, now: Tensor) -> bool:
    """Whether two tensors, on any devices, have the same dtype, shape and bits; NaN equals itself."""
    if (was.dtype, was.layout, was.is_nested) != (now.dtype, now.layout, now.is_nested):
        return False
    before, after = _plain_parts(was), _plain_parts(now)
    if [part.shape for part in before] != [part.shape for part in after]:
        return False
    pairs = ((INTEGERS[part.element_size()], part, other) for part, other in zip(before, after, strict=True))
    return all(torch.equal(part.view(kind), other.view(kind)) for kind, part, other in pairs)


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """What a tensor of any layout consists of, as real and dense tensors on the CPU."""
    tensor = tensor.detach()
    if tensor.is_nested:  # which has no shape
        return [part for each in tensor.unbind() for part in _plain_parts(each)]
    if tensor.is_quantized:  # which must not be viewed as integers
        return [tensor.int_repr().cpu(), tensor.dequantize().cpu()]
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor]


def is_same(was: Any, now: Any) -> bool:
    """Whether two leaves have the same value; tensors must be the same object."""
    if isinstance(was, (Tensor, Place)) or isinstance(now, (Tensor, Place)):
        return was is now
    return was is now or (type(was) is type(now) and repr(was) == repr(now))


def may_be_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of the same size, which costs little to find out."""
    return other is tensor or (other.is_nested == tensor.is_nested and other.numel() == tensor.numel())


def is_alike(value: Any, leaf: Any) -> bool:
    """Whether two leaves have the same value, or are tensors with the same bits."""
    return is_same(value, leaf) or (isinstance(value, Tensor) and isinstance(leaf, Tensor) and equal_bits(value, leaf))


def is_nonzero(gradient: Tensor) -> bool:
    """Whether a gradient, which may be sparse, has an element that is not zero."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).count_nonzero())


def difference(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """How a leaf differs from the one of this name after a resume; None if it does not."""
    was, now = mine.get(name), theirs.get(name)
    if name not in theirs or name not in mine:
        if any(isinstance(value, Tensor) or type(value) in (int, float) for value in (was, now)):
            return "is not restored" if name in mine else "appears after a resume, but was not there"
    elif isinstance(was, Tensor) and isinstance(now, Tensor):
        if not equal_bits(was, now):
            return "different values come back"
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
