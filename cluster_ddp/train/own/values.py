"""Finds the tensors in a value, detects changes from a few of their elements, and recognizes single numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.errors import TrainError

_SAMPLE = 64  # number of elements sampled per tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, searched through dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has elements that can be read."""
    return not (tensor.is_meta or tensor.is_nested) and tensor.layout is torch.strided and tensor.numel() > 0


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of what was there before and has another value now."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where the elements of these tensors begin in memory."""
    return {tensor.data_ptr() for tensor in tensors if has_values(tensor)}


def sampled(tensors: Iterable[Tensor]) -> int:
    """A fingerprint of some elements of each tensor."""
    return fingerprint([_some_of(tensor.detach()) for tensor in tensors])


def _some_of(tensor: Tensor) -> Tensor:
    step = -(-tensor.numel() // _SAMPLE)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    # Flattening would copy all of it: a table of data may be as large as the memory.
    return tensor[torch.unravel_index(torch.arange(0, tensor.numel(), step, device=tensor.device), tensor.shape)]


def has_tensors(value: Any) -> bool:
    """Whether a value is, or contains, a tensor or an array of several elements."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, np.ndarray):
        return value.size > 1
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(has_tensors, value))


def fingerprint_of(value: Any) -> int:
    """A fingerprint of some elements of the tensors and arrays that `has_tensors` finds."""
    if isinstance(value, Tensor):
        return sampled([value]) if has_values(value) else 0
    if isinstance(value, np.ndarray):
        return fingerprint(value.flat[:: -(-value.size // _SAMPLE)]) if value.size else 0
    if isinstance(value, dict):
        value = list(value.values())
    return fingerprint([fingerprint_of(part) for part in value]) if isinstance(value, (list, tuple)) else 0


def is_number(value: Any) -> bool:
    """Whether this is one number, also as a tensor or of NumPy, or None, as before the first one."""
    is_scalar = isinstance(value, (int, float, np.number)) or (isinstance(value, Tensor) and value.dim() == 0)
    return value is None or is_scalar


def one_number(name: str, value: Any) -> float:
    """A number that is logged, or the one that a tensor or an array holds; an int remains one.

    Raises
    ------
    TrainError
        It is something else, or holds several.
    """
    number = value
    with contextlib.suppress(ValueError, RuntimeError):  # it has several elements
        number = value.item() if hasattr(value, "item") else value
    if isinstance(number, (int, float)):
        return number
    shape = f" and shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TrainError(
        f"run.log: the value of {name} is of type {type(value).__name__}{shape}, not one number: log its mean, or each "
        "element under a name of its own"
    )
