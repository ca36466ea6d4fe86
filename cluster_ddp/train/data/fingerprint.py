"""Computes fingerprints of items, to detect data sets that do not return the same item again."""

from __future__ import annotations

import collections
import functools
import random
import threading
import time
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset

from cluster_ddp.train.objects.inner_parts import can_be_seen, inner_parts

# How often threads are given a chance to draw in another order: few readings show it where they wait for nothing.
_READINGS, _SECONDS_OF_READING = 50, 1.0
_DEPTH = 10  # how deep objects are searched
# What they refer to is no content of a sample; sets and networks are large, too.
_WITHOUT_CONTENT = (type, ModuleType, FunctionType, MethodType, functools.partial, Dataset, nn.Module)
_SPARSE: dict[torch.layout, Callable[[Tensor], tuple[Tensor, ...]]] = {
    torch.sparse_coo: lambda tensor: (tensor.coalesce().indices(), tensor.coalesce().values()),
    torch.sparse_csr: lambda tensor: (tensor.crow_indices(), tensor.col_indices(), tensor.values()),
    torch.sparse_csc: lambda tensor: (tensor.ccol_indices(), tensor.row_indices(), tensor.values()),
}


def fingerprint(value: Any) -> int:
    """Hash the tensors, arrays, numbers and strings in a value and in attributes; of the rest, only the types count."""
    return _fingerprint(value, ())


def fingerprint_without_objects(value: Any) -> int:
    """The same without attributes, which an object may compute when they are first asked for: by its type only."""
    return _fingerprint(value, (0,) * _DEPTH)


def drawn_to(generator: Any) -> int:
    """A number that changes with each draw from a generator; 0 for `SystemRandom`, which has no state."""
    if isinstance(generator, random.SystemRandom):
        return 0
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits: Any = getattr(generator, "bit_generator", generator)
        return fingerprint(bits.state)
    return fingerprint(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def settled(read: Callable[[], int], agree: Callable[[bool], bool] = bool) -> int | None:
    """Read until two consecutive readings agree, at most three times; None if no two do.

    The first may differ: a library that is imported on first use may draw random numbers while being imported. If
    reading starts threads, which may draw in another order each time, it is repeated more often.

    Parameters
    ----------
    agree
        Says whether something holds on all ranks, if all of them have to read equally often.
    """
    threads = threading.active_count()
    last = read()
    for _ in range(2):
        before, last = last, read()
        if agree(last == before):
            return last if agree(threading.active_count() <= threads) or _stays(read, last, agree) else None
    return None


def _stays(read: Callable[[], int], found: int, agree: Callable[[bool], bool]) -> bool:
    end = time.monotonic() + _SECONDS_OF_READING
    for _ in range(_READINGS):
        if not agree(read() == found):
            return False
        if agree(time.monotonic() > end):
            break
    return True


def _fingerprint(value: Any, around: tuple[int, ...]) -> int:
    hashed = xxhash.xxh3_64()
    _add(hashed, value, around)
    return hashed.intdigest() >> 1  # fits a signed 64-bit integer


def _add(hashed: Any, value: Any, around: tuple[int, ...]) -> None:
    """Add a value; `around` are the ids of the objects that it is a part of."""
    hashed.update(type(value).__name__.encode())
    if isinstance(value, Tensor) and value.is_nested:  # even its shape is not available in the usual way
        for part in value.unbind():
            _add(hashed, part, around)
    elif isinstance(value, Tensor) and value.layout in _SPARSE:
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        for part in _SPARSE[value.layout](value):
            _add(hashed, part, around)
    elif isinstance(value, Tensor):
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_quantized:
            value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            flat = value.as_strided((value.numel(),), (1,))  # a single element may have any stride
            hashed.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        hashed.update(f"{array.dtype}{array.shape}".encode())
        if not array.dtype.hasobject:
            hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        else:
            _add(hashed, array.tolist(), around)
        if isinstance(value, np.ma.MaskedArray):
            _add(hashed, np.ma.getmaskarray(value), around)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _add(hashed, key, around)
            _add(hashed, part, around)
    elif isinstance(value, (list, tuple, collections.deque)):
        for part in value:
            _add(hashed, part, around)
    elif isinstance(value, bytes):
        hashed.update(value)
    elif isinstance(value, (str, int, float, complex)):
        hashed.update(repr(value).encode())
    elif hasattr(type(value), "tobytes"):  # a Pillow image
        hashed.update(value.tobytes())
    elif isinstance(value, (set, frozenset)):
        hashed.update(str(sorted(_fingerprint(part, around) for part in value)).encode())
    elif len(around) < _DEPTH and id(value) not in around and not isinstance(value, _WITHOUT_CONTENT):
        for name, part in inner_parts(value) if can_be_seen(value) else ():  # such as a batch that is a dataclass
            hashed.update(name.encode())
            _add(hashed, part, (*around, id(value)))
