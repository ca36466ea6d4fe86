"""A fingerprint of the indices, tensors and arrays that a data set holds, by which another split is recognised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data as torch_data
from torch import Tensor

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.own.values import has_values, sampled

_SAMPLE = 64  # elements of a list or an array that are looked at
_DEPTH = 6  # of data sets in data sets


def held_data(data: Any) -> int | None:
    """Look at some elements of what a map-style set holds, without reading an item; None where it holds no numbers.

    Strings are left out, since a path may be another one in each job, and arrays in files, since they may be a cache.
    """
    found = list(_numbers(data, _DEPTH))
    return fingerprint(found) if found else None


def _numbers(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor):
        if has_values(value) and value.is_contiguous():
            yield sampled([value])
    elif isinstance(value, np.ndarray):
        if not isinstance(value, np.memmap) and value.dtype.kind in "biuf" and value.size:
            yield [value.shape, value.flat[:: -(-value.size // _SAMPLE)]]
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(part, (int, float, np.integer)) for part in value[:: -(-len(value) // _SAMPLE)]):
            yield [len(value), [float(part) for part in value[:: -(-len(value) // _SAMPLE)]]]
        elif len(value) <= _SAMPLE and depth:
            for part in value:
                yield from _numbers(part, depth - 1)
    elif isinstance(value, torch_data.Dataset) and depth:
        for part in list(vars(value).values()):
            yield from _numbers(part, depth - 1)
