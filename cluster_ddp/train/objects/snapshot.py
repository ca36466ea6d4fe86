"""Finds what objects keep in plain attributes: numbers, strings and tensors, wherever they may be."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import datetime
import io
import numbers
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Event
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from torch.utils.weak import TensorWeakRef

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.objects.comparing import Place
from cluster_ddp.train.objects.contents import contents
from cluster_ddp.train.objects.held import are_hooks, hooks_of_tensor, of_module, of_tensor, recomputed
from cluster_ddp.train.objects.inner_parts import (
    CONTAINERS,
    can_be_seen,
    compiled_numbers,
    elements,
    has_attributes,
    inner_parts,
    length,
)
from cluster_ddp.train.objects.kinds import (
    SEEN_INTO,
    is_of_library,
    is_plain,
    is_small,
    is_value,
    kind_of,
    may_take_turns,
)
from cluster_ddp.train.objects.places import (
    is_iterator,
    number_of_children,
    place_in_file,
    place_of,
    place_of_generator,
    place_of_tensor,
)
from cluster_ddp.train.objects.whose_code import is_of_user
from cluster_ddp.train.randomness import GENERATORS

_DEPTH, _WIDTH = 10, 100  # how deep objects are searched, and how many elements of lists one by one
_FAR = 1_000_000  # the limit for longer ones, of which numbers and strings are hashed together, and the rest sampled
_NUMBERS = 1 << 26  # bytes of an array in a data set that steps may change
_ROWS = 4096  # rows of a data frame that are compared
LENGTH, TRAINED, GRADIENT = ", its length", ", whether it is trained", ", its gradient"  # ends of names
GROUPS = ".param_groups."  # in the names of what groups of optimizers hold
_GENERATOR = "a random generator"
_NOTHING = object()
_BYTES = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
# From libraries, with a complete repr().
_VALUES = (
    numbers.Number, range, slice, PurePath, datetime.date, datetime.time, datetime.timedelta,
    torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip
# What two names refer to may be equal by chance only.
_COPIED = (*_VALUES, np.generic, tuple, frozenset)


class Snapshot:
    """The numbers, strings and tensors that objects hold at the moment, by name.

    Parameters
    ----------
    holders
        The objects, by name.
    known
        Names of objects to skip, because they are saved anyway, by their ids, and for tensors by `place_of_tensor` as
        well. Of a part of something, the name has a dot.
    names
        Names of tensors that are keys of dicts, by their ids.
    seeded
        The random generators that are seeded for each step; None: all.
    earlier
        A snapshot of before: what it has found keeps its name, even if something before it now refers to it, too.
    read
        Ids of the data sets from which batches are made; None: all.
    in_steps
        Whether the code of steps uses an attribute of this name, and so may change what such a data set holds.
    """

    def __init__(
        self,
        holders: Mapping[str, Any],
        known: Mapping[Any, str] | None = None,
        names: Mapping[int, str] | None = None,
        seeded: Container[Any] | None = None,
        earlier: Snapshot | None = None,
        read: Container[int] | None = None,
        in_steps: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.leaves: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._kinds: dict[str, Any] = {}  # a non-plain value may be replaced by something with the same leaves
        self._aliases: dict[str, str] = {}  # names of what was found before under another name, and that name
        self._objects: dict[str, Any] = {}  # by the first of these names
        self._trained: dict[str, bool] = {}  # of tensors that belong to no module
        self._gradients: dict[str, tuple[TensorWeakRef, int]] = {}  # with their versions; not kept in memory by this
        self._seeded, self._read, self._in_steps = seeded, read, in_steps
        self._known = set((known or {}).values())
        self._seen: dict[Any, str] = dict(known or {})  # the first name of what was found
        modules = [holder for holder in holders.values() if isinstance(holder, nn.Module)]
        self._of_modules = {id(weight) for module in modules for weight in module.parameters()}
        self._names = names or {}
        # How many elements each deque may hold, None: any number; and what makes those that a defaultdict lacks.
        self.limits: dict[str, Any] = {}
        self.keys: dict[str, set[type]] = {}  # the classes of the keys of each dict
        self.doubled: list[str] = []  # dicts that have a key also as a string
        self.holders: dict[str, str] = {}  # the holder of each leaf and of each entry in _kinds
        self._named_before: dict[int, str] = {} if earlier is None else earlier._seen
        self._later: list[tuple[str, Any, int]] = []  # what another name may lead to
        later: list[tuple[str, list[tuple[str, Any, int]]]] = []
        for name, holder in holders.items():
            self._look_from(name, [(name, holder, 0)])
            later.append((name, self._later))
            self._later = []
        self._named_before = {}
        for name, found in later:
            self._look_from(name, found)
        tensors = ((name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, Tensor))
        self._contents = contents(tensors)

    def add(self, other: Snapshot) -> None:
        """Merge what was found elsewhere, under other names."""
        self.leaves |= other.leaves
        self.holders |= other.holders
        self._versions |= other._versions
        self._kinds |= other._kinds
        self._aliases |= other._aliases
        self._objects |= other._objects
        self._trained |= other._trained
        self._gradients |= other._gradients
        self._contents |= other._contents

    def _look_from(self, holder: str, values: list[tuple[str, Any, int]]) -> None:
        kept: tuple[dict[str, Any], ...] = (self.leaves, self._kinds, self._trained, self._gradients)
        known_before = [len(found) for found in kept]
        for value in values:
            self._look(*value)
        for found, known_found in zip(kept, known_before, strict=True):
            self.holders.update(dict.fromkeys(islice(found, known_found, None), holder))

    def _look(self, name: str, value: Any, depth: int) -> None:
        if is_value(value):
            self.leaves[name] = value
            return
        if depth > _DEPTH or not can_be_seen(value):
            return
        self._kinds[name] = kind_of(value)
        if id(value) not in self._seen and self._named_before.get(id(value), name) != name:
            self._later.append((name, value, depth))
            return
        place = place_of_tensor(value) if type(value) is Tensor and id(value) not in self._seen else None
        first = self._seen.setdefault(place if place in self._seen else id(value), name)
        if first is not name and (may_take_turns(value) or isinstance(value, GENERATORS)):
            self._aliases[name], self._objects[first] = first, value
            return
        if first is not name and not isinstance(value, _COPIED):
            return
        with contextlib.suppress(Exception):  # it may have no attributes, or be no list, despite its class
            self._look_at(name, value, depth)

    def _look_at(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._look_at_tensor(name, value, depth)
            return
        if isinstance(value, (*CONTAINERS, np.ndarray, numbers.Number)) and has_attributes(value):  # a derived class
            self._look_into(vars(value).items(), name, depth)
        if isinstance(value, dict):
            self._look_at_dict(name, value, depth)
        elif isinstance(value, (list, tuple, collections.deque)) or _holds_objects(value):
            self._look_at_list(name, value, depth)
        elif isinstance(value, (set, frozenset)):
            parts = list(islice(elements(value), _FAR))
            self.leaves[f"{name}, its elements"] = length(value), hash(frozenset(filter(is_plain, parts)))
            self._look_into(enumerate(part for part in parts if not is_plain(part)), name, depth)
        elif isinstance(value, GENERATORS):  # once seeded, its state follows from the step
            is_seeded = self._seeded is None or value in self._seeded
            self.leaves[name] = _GENERATOR if is_seeded else place_of_generator(value)
            self.leaves[f"{name}, its children"] = number_of_children(value)
        elif isinstance(value, SynchronizedBase):  # such as a multiprocessing.Value, by which workers are sent a level
            self._look(name, value.get_obj(), depth)
        elif isinstance(value, memoryview):
            self._look(name, value.obj, depth)
        elif is_iterator(value):
            self._look_at_iterator(name, value, depth)
        elif isinstance(value, nn.Module):
            self._look_at_module(name, value, depth)
        elif isinstance(value, Dataset):
            self._look_into(self._parts_of_data(value), name, depth)
        elif (leaf := _as_one_value(value)) is not _NOTHING:
            self.leaves[name] = leaf
        elif isinstance(value, io.TextIOBase):  # a binary one is often read at any place
            if value.readable() and value.seekable() and not value.writable():
                self.leaves[name] = place_in_file(value)
        elif isinstance(value, SEEN_INTO) or not is_of_library(value):
            but = recomputed(value)
            inner = [(key, part) for key, part in inner_parts(value) if key not in but]
            inner += compiled_numbers(value)
            self._look_into(inner, name, depth)
            self._skim(name, inner[_WIDTH:], [part for _, part in inner[_WIDTH:]], depth)

    def _look_at_tensor(self, name: str, tensor: Tensor, depth: int) -> None:
        self.leaves[name] = tensor
        self._versions[name] = 0 if tensor.is_inference() else tensor._version
        if tensor.is_leaf and id(tensor) not in self._of_modules:
            self._trained[name + TRAINED] = tensor.requires_grad
        if tensor.is_leaf and tensor.grad is not None:
            self._gradients[name + GRADIENT] = TensorWeakRef(tensor.grad), tensor.grad._version
        self._look_into({**of_tensor(tensor), **hooks_of_tensor(tensor)}.items(), name, depth)

    def _look_at_dict(self, name: str, value: dict[Any, Any], depth: int) -> None:
        items = list(dict.items(value))
        keys = range(len(items)) if are_hooks(value) else [self._key(key, n) for n, (key, _) in enumerate(items)]
        parts = [part for _, part in items]
        self.keys[name] = {type(key) for key, _ in items[:_WIDTH]}
        self.limits[name] = value.default_factory if isinstance(value, collections.defaultdict) else None
        if len(self.keys[name]) > 1 and any(str(key) in value for key, _ in items[:_WIDTH] if type(key) is not str):
            self.doubled.append(name)
        self._look_into(zip(keys, parts, strict=False), name, depth)
        self._skim(name, items[_WIDTH:_FAR], parts[_WIDTH:_FAR], depth)

    def _look_at_list(self, name: str, value: Any, depth: int) -> None:
        objects = value.reshape(-1).tolist() if isinstance(value, np.ndarray) else value
        self.leaves[f"{name}{LENGTH}"] = length(objects)
        self.limits[name] = value.maxlen if isinstance(value, collections.deque) else None
        parts = list(islice(elements(objects), _FAR))
        self._look_into(enumerate(parts), name, depth)
        self._skim(name, parts[_WIDTH:], parts[_WIDTH:], depth)

    def _look_at_iterator(self, name: str, iterator: Any, depth: int) -> None:
        place = place_of(iterator)
        is_variable = depth == 0 and not name.startswith(("task.", "model"))
        # One whose place is not known always looks moved, so it counts only if a step names the variable.
        if not (isinstance(place, Place) and is_variable and not self._in_steps(name.rpartition(".")[2])):
            self.leaves[name] = place

    def _look_at_module(self, name: str, whole: nn.Module, depth: int) -> None:
        self._of_modules.update(map(id, whole.parameters()))
        for prefix, module in whole.named_modules():
            self._seen.setdefault(id(module), f"{name}.{prefix}".removesuffix("."))
        for prefix, module in whole.named_modules():
            held = {**of_module(module), **module._parameters, **module._buffers}
            self._look_into(held.items(), f"{name}.{prefix}".removesuffix("."), depth)

    def _parts_of_data(self, data: Dataset[Any]) -> list[tuple[str, Any]]:
        """What a step may set in a data set, such as a level of difficulty.

        Nothing large, and no files that are opened late. Reading changes other things, such as a cache; what steps use
        may be a memory of theirs.
        """
        is_read = self._read is None or id(data) in self._read
        may_be_set = not (is_read and isinstance(data, IterableDataset))
        return [
            (key, part)
            for key, part in list(vars(data).items())
            if (may_be_set and is_small(part)) or (_is_memory(part) and (not is_read or self._in_steps(key)))
        ]

    def _look_into(self, parts: Iterable[tuple[object, Any]], name: str, depth: int) -> None:
        for key, part in islice(parts, _WIDTH):
            self._look(f"{name}.{key}", part, depth + 1)

    def _skim(self, name: str, rest: list[Any], parts: list[Any], depth: int) -> None:
        """Add the numbers and strings in the rest of a long list or dict as one hash, and a sample of other parts."""
        plain = (None if part != part else part for part in filter(is_plain, rest))  # every NaN hashes differently
        if seen := tuple(plain):  # nothing for parameters with empty states, which are not restored and need not be
            self.leaves[f"{name}, the rest"] = hash(seen)
        for number in range(0, len(parts), -(-len(parts) // _WIDTH) or 1):
            if not is_plain(parts[number]):
                self._look(f"{name}.{_WIDTH + number}", parts[number], depth + 1)

    def _key(self, key: Any, number: int) -> str:
        return self._names.get(id(key), str(number)) if isinstance(key, Tensor) else str(key)


def _is_memory(part: Any) -> bool:
    """Whether a part of a data set may be what steps add to it: a container, numbers, or an object of the user's."""
    is_array = isinstance(part, np.ndarray) and part.nbytes <= _NUMBERS
    return is_array or isinstance(part, CONTAINERS) or is_of_user(type(part).__module__)


def _holds_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def _as_one_value(value: Any) -> Any:
    """What tells a value without parts that are looked at, such as an array, from others."""
    if isinstance(value, np.generic):
        return value.item()  # which state_dict() may return
    if isinstance(value, np.ndarray):
        # A file that is mapped read-only may be larger than the memory.
        is_file = not value.flags.writeable and (isinstance(value, np.memmap) or value.nbytes > _NUMBERS)
        return repr(value) if is_file else fingerprint(value)
    if isinstance(value, np.random.SeedSequence):
        return repr(value.state)
    if isinstance(value, ctypes._SimpleCData) and is_value(value.value):
        return value.value  # which state_dict() may return
    if isinstance(value, _BYTES):
        return bytes(value)
    if isinstance(value, (Event, threading.Event)):
        return value.is_set()
    if isinstance(value, _VALUES):
        return repr(value)
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return value.getvalue()
    if callable(getattr(type(value), "to_numpy", None)):  # a pandas or polars frame or series
        return fingerprint(value[:: len(value) // _ROWS + 1].to_numpy())
    return _NOTHING
