"""Determines the kind of a map-style data set, what it holds and shares, unwraps subsets, and copies sets."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from cluster_ddp.printing import say
from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.data.order import Indices
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.objects.inner_parts import elements, has_attributes, length
from cluster_ddp.train.objects.surroundings import variables_around
from cluster_ddp.train.objects.whose_code import is_of_user
from cluster_ddp.train.randomness import parts_of
from cluster_ddp.train.ranks.distributed import find_world

_DEPTH, _FEW = 4, 100  # how deep in a set parts are copied, and the longest containers copied
_FAR, _LARGE = 100_000, 1 << 24  # elements of lists, and bytes of arrays, up to which it is seen what reading changes
_PLACE_BITS = 40  # of a position
_PLACES, _LEAST = (1 << _PLACE_BITS) - 1, 1 << (_PLACE_BITS - 1)
_CONTAINERS = (dict, list, set, collections.deque)


def is_plain_rows(data: Dataset[Any]) -> bool:
    """Whether a set is nothing but rows of tensors: a TensorDataset that does not override how samples are fetched."""
    return (
        isinstance(data, TensorDataset)
        and type(data).__getitem__ is TensorDataset.__getitem__
        and not hasattr(data, "__getitems__")
    )


def fetches_by_batch(data: Dataset[Any]) -> bool:
    """Whether a set has ``__getitems__`` that no derived class overrides by defining only ``__getitem__``."""
    for kind in type(data).__mro__:
        if "__getitems__" in vars(kind):
            return vars(kind)["__getitems__"] is not None
        if "__getitem__" in vars(kind):
            return False
    return callable(getattr(data, "__getitems__", None))


def refuse_loader(data: object, method: str) -> None:
    """Raise a `DataError` if a task method returned a DataLoader instead of a data set."""
    if isinstance(data, DataLoader):
        raise DataError(
            f"{method} returned a DataLoader; return its data set: the trainer makes the batches itself, "
            "from train.batch_size, train.workers and collate() of the task. A data set can make the choices of a "
            "sampler, such as by weights, in __getitem__"
        )


def unwrapped(data: Dataset[Any]) -> tuple[Dataset[Any], list[Subset[Any]]]:
    """Unwrap Subsets, whose ``__getitems__`` would prevent seeding the inner set's samples one by one.

    Returns
    -------
    The inner set, and the Subsets, from the outermost one on.
    """
    subsets: list[Subset[Any]] = []
    while _is_subset(data):
        subsets.append(data)
        data = data.dataset
    return data, subsets


def positions_in(subsets: Sequence[Subset[Any]], indices: Indices) -> Indices:
    """The positions in the innermost set of these samples; looked up each time, as a step may choose others."""
    for subset in subsets:
        held = subset.indices
        if isinstance(held, (Tensor, np.ndarray)):
            indices = _as_indices(held)[indices]
        else:
            indices = np.array([int(held[index]) for index in indices.tolist()], dtype=np.int64)
    return indices


def numbers_of_copies(positions: Indices) -> Indices | None:
    """How often each position has occurred before, in bits that `place_in` removes; None if none occurs twice.

    Added to the positions, they let each copy of a sample draw random numbers of its own.
    """
    ordered = np.sort(positions)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    order = np.argsort(positions, kind="stable")
    _, firsts, counts = np.unique(ordered, return_index=True, return_counts=True)
    occurrences = np.empty_like(positions)
    occurrences[order] = np.arange(len(positions)) - np.repeat(firsts, counts)
    return occurrences << _PLACE_BITS


def place_in(position: int) -> int:
    """The place in the set of what may be the number of a copy, too."""
    return (position + _LEAST & _PLACES) - _LEAST  # which may be negative


def ids_of_sets(*data: Dataset[Any] | None) -> set[int]:
    """The ids of data sets, and of those in them."""
    return {id(part) for part in parts_of(*data) if isinstance(part, Dataset)}


def share_memory(tensors: Iterable[Tensor], holders: Iterable[object]) -> bool:
    """Whether one of the holders, or a part of it, is a tensor or an array in the memory of one of these tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    places = [range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    for part in parts_of(*holders):
        if isinstance(part, np.ndarray):
            found = part.ctypes.data
        elif isinstance(part, Tensor) and part.layout is torch.strided:
            found = part.data_ptr()
        else:
            continue  # what is no number would be looked for byte by byte
        if any(found in place for place in places):
            return True
    return False


class Numbers:
    """The numbers in the attributes of a data set, its parts and its `collate`, as far as their classes are the user's.

    Also those in their arrays, tensors, lists and dicts, and in the variables of their modules and classes. What
    reading changes, a resume does not repeat, and later samples may depend on it.
    """

    def __init__(self, *holders: object) -> None:
        self._found: dict[str, list[Any]] = {}  # by name: the same objects may have been made again, as in a cache
        parts = list(parts_of(*holders, depth=_DEPTH))
        for part in parts:
            if is_of_user(type(part).__module__) and has_attributes(part):
                for key, value in list(vars(part).items()):
                    self._add(f"{type(part).__name__}.{key}", value)
        for name, value in variables_around(parts).items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        with contextlib.suppress(Exception):  # such as an array of a kind that cannot be hashed
            if (mark := _mark_of_numbers(value)) is not None:
                self._found.setdefault(name, []).append(mark)

    def changed(self, now: Numbers) -> list[str]:
        """The names of those that are different now, or were not there."""
        return sorted(name for name, values in now._found.items() if self._found.get(name) != values)


def _mark_of_numbers(value: Any) -> Any:
    if type(value) in (int, float):
        return value
    if isinstance(value, (np.ndarray, Tensor)) and not isinstance(value, np.memmap):
        return fingerprint(value) if value.nbytes <= _LARGE else None
    if isinstance(value, (list, dict, collections.deque)) and length(value) <= _FAR:
        return [part for part in elements(value) if type(part) in (int, float)]
    return None


def warn_of_counts(data: object, before: Numbers, after: Numbers) -> None:
    """Warn of numbers that were changed by reading the same samples of a training set again."""
    worker = get_worker_info()
    if (names := before.changed(after)) and find_world().is_main and (worker is None or worker.id == 0):
        say(
            f"cluster-ddp: reading the training set ({type(data).__name__}) changes {', '.join(names)}, "
            "which no checkpoint contains: a resume is exact only if no sample and no batch depends on it. If it is "
            "only printed or logged, ignore this; otherwise let a sample depend only on its index and on random "
            "numbers"
        )


def _is_subset(data: Dataset[Any]) -> TypeGuard[Subset[Any]]:
    kind = type(data)
    return isinstance(data, Subset) and all(
        getattr(kind, name) is getattr(Subset, name) for name in ("__getitem__", "__getitems__")
    )


def _as_indices(positions: Tensor | np.ndarray) -> Indices:
    return torch.as_tensor(positions, dtype=torch.int64).numpy()


def length_of(data: Any) -> int:
    return len(data) if hasattr(data, "__len__") else 0


def copied(data: Any) -> Any:
    """Copy a data set; None if it cannot be copied.

    The copy has its own caches and vocabularies, including those in the user's objects that it holds, because they
    start small. Large containers and objects of libraries are shared with the original.
    """
    try:
        made = copy.copy(data)
        _part_from(made, {id(data): made}, _DEPTH)
    except Exception:
        return None
    return made


def _part_from(value: Any, done: dict[int, Any], depth: int) -> None:
    """Replace what a copy still shares with its original by copies."""
    if depth and isinstance(value, dict):
        parts_by_key = {key: _copied_part(part, done, depth - 1) for key, part in value.items()}
        dict.update(value, parts_by_key)  # Counter.update would add to the existing values
    elif depth and isinstance(value, (list, collections.deque)):
        parts = [_copied_part(part, done, depth - 1) for part in value]
        value.clear()
        value.extend(parts)
    elif depth and has_attributes(value):
        _part_from(vars(value), done, depth)


def _copied_part(value: Any, done: dict[int, Any], depth: int) -> Any:
    if id(value) not in done:
        done[id(value)] = value
        if (len(value) <= _FEW) if isinstance(value, _CONTAINERS) else _is_object_of_user(value):
            with contextlib.suppress(Exception):
                done[id(value)] = made = copy.copy(value)
                _part_from(made, done, depth)
    return done[id(value)]


def _is_object_of_user(value: Any) -> bool:
    """Whether it is a plain object of the user's code, without ``__del__``, which may close something."""
    kind = type(value)
    return has_attributes(value) and not callable(getattr(kind, "__del__", None)) and is_of_user(kind.__module__)
