"""Fingerprints of what a data set contains, to detect a different split after a resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch.utils.data as torch_data
from torch import Tensor

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.own.values import has_values, sampled

_SAMPLE = 64  # number of elements sampled from a list or an array
_DEPTH = 6  # how deep to search data sets in data sets


def held_data(data: Any) -> int | None:
    """A fingerprint of the indices of each `Subset` and the tensors of each `TensorDataset`; None if there are none.

    Lists of numbers count as well, because they may be indices. Other arrays and tensors do not: they may be a cache,
    which is empty at each start.
    """
    found = list(_numbers(data, _DEPTH))
    return fingerprint(found) if found else None


def held_rows(data: Any) -> int | None:
    """A fingerprint of the arrays, tensors, tables and lists that are as long as the data set; None if there are none.

    These are usually its samples but may be a cache, so a difference does not prove that the samples differ.
    """
    found = list(_rows(data, _DEPTH))
    return fingerprint(found) if found else None


def _rows(data: Any, depth: int) -> Iterator[Any]:
    if isinstance(data, (list, tuple)) and len(data) <= _SAMPLE and depth:
        for part in data:
            yield from _rows(part, depth - 1)
    if not (isinstance(data, torch_data.Dataset) and isinstance(data, Sized) and depth):
        return
    try:
        length = len(data)
    except TypeError:  # of a ChainDataset of sets without a length
        return
    for part in list(vars(data).values()):
        yield from _rows(part, depth - 1)
        is_held = isinstance(part, (list, tuple, np.ndarray, Tensor)) and not isinstance(part, np.memmap)
        with contextlib.suppress(Exception):  # whatever has no length, such as a mean, or no values to read
            if (is_held or hasattr(part, "iloc")) and len(part) == length:  # the latter: pandas
                held: Any = getattr(part, "iloc", part)
                some = held[:: -(-length // _SAMPLE)]
                yield list(_seen(some.to_numpy() if hasattr(some, "to_numpy") else some, 3))


def _seen(value: Any, depth: int) -> Iterator[Any]:
    """The numbers in a value; no strings, because file names may have a different folder after a resume."""
    if isinstance(value, Tensor) and value.dim():
        yield sampled([value])
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield value.reshape(-1)[:: -(-value.size // _SAMPLE)]
    elif isinstance(value, (int, float, np.number, Tensor)):
        yield str(value)
    elif isinstance(value, (list, tuple, dict, np.ndarray)) and depth:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _seen(part, depth - 1)


def _numbers(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(part, (int, float, np.integer)) for part in value[:: -(-len(value) // _SAMPLE)]):
            yield [len(value), [str(part) for part in value[:: -(-len(value) // _SAMPLE)]]]
        elif len(value) <= _SAMPLE and depth:
            for part in value:
                yield from _numbers(part, depth - 1)
    elif isinstance(value, torch_data.Dataset) and depth:
        if isinstance(value, torch_data.Subset):
            yield from _array(value.indices)
        if isinstance(value, torch_data.TensorDataset):
            yield sampled(tensor for tensor in value.tensors if has_values(tensor) and tensor.is_contiguous())
        for part in list(vars(value).values()):
            yield from _numbers(part, depth - 1)


def _array(indices: Any) -> Iterator[Any]:
    """Indices in an array or a tensor, rather than a list."""
    if isinstance(indices, (np.ndarray, Tensor)) and len(indices):
        yield [len(indices), [str(part) for part in indices[:: -(-len(indices) // _SAMPLE)].tolist()]]
