"""A fingerprint of what a data set is made of, by which another split is recognised."""

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
    """Look at the indices of each `Subset` and the tensors of each `TensorDataset`; None where there are none.

    Lists of numbers, which may be indices, count as well. Other arrays and tensors do not: they may be a cache, which
    is empty at each start.
    """
    found = list(_numbers(data, _DEPTH))
    return fingerprint(found) if found else None


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
    """Indices that are no list."""
    if isinstance(indices, (np.ndarray, Tensor)) and len(indices):
        yield [len(indices), [str(part) for part in indices[:: -(-len(indices) // _SAMPLE)].tolist()]]
