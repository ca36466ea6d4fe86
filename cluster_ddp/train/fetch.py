"""Getting samples out of a map-style data set, by batch where the set can, seeded one by one where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from cluster_ddp.train.errors import DataError
from cluster_ddp.train.randomness import derive, mix, seed_host
from cluster_ddp.train.sampler import Indices
from cluster_ddp.train.task import Task

_DEFAULT_COLLATES = (default_collate, Task.collate)
_MOST_AT_ONCE = 32
_BYTES_AT_ONCE = 1 << 19

Collate = Callable[[list[Any]], Any]


class Fetcher:
    """Makes batches of the samples at given indices.

    Parameters
    ----------
    data
        A map-style data set.
    collate
        Makes a batch of a list of items.
    seed_words
        What the random numbers of a sample depend on, besides the epoch and its index.
    """

    def __init__(self, data: Dataset[Any], collate: Collate, *seed_words: int) -> None:
        self._data, self._positions = _unwrap(data)
        self._collate = collate
        self._base = derive(*seed_words)
        self._by_rows = _is_plain(self._data) and getattr(collate, "__func__", collate) in _DEFAULT_COLLATES
        if self._by_rows:
            self._read: Callable[[int, Indices], Any] = self._by_tensor
        elif callable(getattr(self._data, "__getitems__", None)):
            self._read = self._by_batch
        else:
            self._read = self._one_by_one

    def __call__(self, epoch: int, indices: Indices) -> Any:
        """Fetch the samples at `indices`, int64 of shape (n,), as one batch.

        Raises
        ------
        DataError
            The items do not fit together. What the data set itself raises is raised as it is.
        """
        return self._read(epoch, indices if self._positions is None else self._positions[indices])

    def at_once(self, samples: int) -> int:
        """How many batches of so many samples are best fetched together.

        Picking a few small rows out of a tensor costs more for the call than for the rows.
        """
        if not self._by_rows:
            return 1
        size = sum(tensor[:1].nbytes for tensor in self._data.tensors) * samples  # type: ignore[attr-defined]
        return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // max(1, size)))

    def together(self, keys: Sequence[tuple[int, Indices]]) -> Iterable[Any]:
        """Fetch the batches of several (epoch, indices); each has memory of its own within what they share."""
        if len(keys) == 1:
            return [self(*keys[0])]
        tensors = self(0, np.concatenate([indices for _, indices in keys]))
        sizes = [len(indices) for _, indices in keys]
        return map(list, zip(*(tensor.split(sizes) for tensor in tensors), strict=True))

    def _by_tensor(self, epoch: int, indices: Indices) -> Any:
        chosen = torch.from_numpy(indices)
        return [
            tensor.index_select(0, chosen) if tensor.is_cpu else tensor.index_select(0, chosen.to(tensor.device))
            for tensor in self._data.tensors  # type: ignore[attr-defined]
        ]

    def _by_batch(self, epoch: int, indices: Indices) -> Any:
        batch = self._data.__getitems__(indices.tolist())  # type: ignore[attr-defined]
        return self._collated(batch, indices) if isinstance(batch, list) else batch

    def _one_by_one(self, epoch: int, indices: Indices) -> Any:
        base = mix(self._base ^ mix(epoch))
        items = []
        for index in indices.tolist():
            seed_host(mix(base ^ index))
            items.append(self._data[index])
        return self._collated(items, indices)

    def _collated(self, items: list[Any], indices: Indices) -> Any:
        try:
            return self._collate(items)
        except (RuntimeError, TypeError, KeyError, IndexError, ValueError) as error:
            raise DataError(
                f"samples {_named(indices)} do not make a batch: {error}\n"
                "    give items of the same structure and shapes, or write collate() of the task"
            ) from error


def _is_plain(data: Dataset[Any]) -> bool:
    """Whether a set is nothing but rows of tensors; a TensorDataset with an ``__getitem__`` of its own is more."""
    return isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__


def _unwrap(data: Dataset[Any]) -> tuple[Dataset[Any], Indices | None]:
    """See through Subset, whose ``__getitems__`` would hide that its set has random samples to be seeded."""
    positions: Indices | None = None
    while type(data) is Subset:
        inner = _as_indices(data.indices)
        positions = inner if positions is None else inner[positions]
        data = data.dataset
    return data, positions


def _as_indices(positions: Sequence[int]) -> Indices:
    return torch.as_tensor(positions, dtype=torch.int64).numpy()


def _named(indices: Indices) -> str:
    shown = ", ".join(map(str, indices[:8].tolist()))
    return shown + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")
