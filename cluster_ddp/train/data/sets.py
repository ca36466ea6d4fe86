"""What kind of map-style set it is, and what lies inside."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from cluster_ddp.train.data.order import Indices


def is_plain_rows(data: Dataset[Any]) -> bool:
    """Whether a set is nothing but rows of tensors; a TensorDataset with a method of its own to fetch by is more."""
    return (
        isinstance(data, TensorDataset)
        and type(data).__getitem__ is TensorDataset.__getitem__
        and not hasattr(data, "__getitems__")
    )


def fetches_by_batch(data: Dataset[Any]) -> bool:
    """Whether a set has ``__getitems__``, and no derived class says otherwise by a ``__getitem__`` alone."""
    for kind in type(data).__mro__:
        if "__getitems__" in vars(kind):
            return True
        if "__getitem__" in vars(kind):
            return False
    return callable(getattr(data, "__getitems__", None))


def unwrapped(data: Dataset[Any]) -> tuple[Dataset[Any], Indices | None]:
    """See through Subset, whose ``__getitems__`` would hide that its set has random samples to be seeded."""
    positions: Indices | None = None
    while _is_subset(data):
        inner = _as_indices(data.indices)
        positions = inner if positions is None else inner[positions]
        data = data.dataset
    return data, positions


def _is_subset(data: Dataset[Any]) -> TypeGuard[Subset[Any]]:
    kind = type(data)
    return isinstance(data, Subset) and all(
        getattr(kind, name) is getattr(Subset, name) for name in ("__getitem__", "__getitems__")
    )


def _as_indices(positions: Sequence[int]) -> Indices:
    return torch.as_tensor(positions, dtype=torch.int64).numpy()


def length_of(data: Any) -> int:
    return len(data) if hasattr(data, "__len__") else 0


def copied(data: Any) -> Any:
    """A shallow copy of a data set; None where it cannot be copied."""
    try:
        return copy.copy(data)
    except Exception:
        return None
