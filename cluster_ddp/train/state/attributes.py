"""Compares what objects keep in plain attributes, to find what training changes and no checkpoint contains."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import datetime
import enum
import functools
import io
import numbers
import threading
from collections.abc import Container, Iterable, Mapping
from itertools import accumulate, islice
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Event
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.inner_parts import CONTAINERS, can_be_seen, elements, inner_parts, length
from cluster_ddp.train.randomness import GENERATORS
from cluster_ddp.train.state.comparing import equal_bits, is_same
from cluster_ddp.train.state.contents import contents
from cluster_ddp.train.state.held import are_hooks, hooks_of_tensor, of_module, of_tensor, recomputed
from cluster_ddp.train.state.kinds import (
    SEEN_INTO,
    is_common,
    is_of_library,
    is_plain,
    is_replaced,
    is_small,
    is_value,
    kind_of,
    may_take_turns,
)
from cluster_ddp.train.state.places import is_iterator, place_in_file, place_of, place_of_generator

_DEPTH, _WIDTH = 10, 100  # how deep objects are searched, and how many elements of lists one by one
_FAR = 1_000_000  # the limit for longer ones, of which numbers and strings are hashed together, and the rest sampled
_ROWS = 4096  # rows of a data frame that are compared
_LENGTH, _TRAINED = ", its length", ", whether it is trained"
GRADIENT = ", its gradient"  # the end of the name of a gradient
_GROUPS = ".param_groups."
_GENERATOR = "a random generator"
_BYTES = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
# From libraries, with a complete repr().
_VALUES = (
    numbers.Number, range, slice, PurePath, datetime.date, datetime.time, datetime.timedelta,
    torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip
# What two names refer to may be equal by chance only.
_COPIED = (*_VALUES, np.generic, tuple, frozenset)


class Attributes:
    """The numbers, strings and tensors that objects hold at the moment, by name.

    Parameters
    ----------
    holders
        The objects, by name.
    known
        Names of objects to skip, because they are saved anyway, by their ids. Of a part of something, the name has a
        dot.
    names
        Names of tensors that are keys of dicts, by their ids.
    seeded
        The random generators that are seeded for each step; None: all.
    earlier
        A snapshot of before: what it has found keeps its name, even if something before it now refers to it, too.
    """

    def __init__(
        self,
        holders: Mapping[str, Any],
        known: Mapping[int, str] | None = None,
        names: Mapping[int, str] | None = None,
        seeded: Container[Any] | None = None,
        earlier: Attributes | None = None,
    ) -> None:
        self.leaves: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._kinds: dict[str, Any] = {}  # a non-plain value may be replaced by something with the same leaves
        self._aliases: dict[str, str] = {}  # names of what was found before under another name, and that name
        self._objects: dict[str, Any] = {}  # by the first of these names
        self._trained: dict[str, bool] = {}  # of tensors that belong to no module
        self._gradients: dict[str, tuple[Tensor, int]] = {}  # with their versions
        self._seeded = seeded
        self._known = set((known or {}).values())
        self._seen: dict[int, str] = dict(known or {})  # the first name of what was found
        modules = [holder for holder in holders.values() if isinstance(holder, nn.Module)]
        self._of_modules = {id(weight) for module in modules for weight in module.parameters()}
        self._names = names or {}
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

    def add(self, other: Attributes) -> None:
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

    def changed(self, now: Attributes) -> list[str]:
        """Names whose values or contents differ in a later snapshot, or that exist in only one of the two."""
        both = self.leaves.keys() & now.leaves.keys()
        same = {
            name
            for name in both
            if (
                is_same(self.leaves[name], now.leaves[name])
                and self._versions.get(name) == now._versions.get(name)
                and self._contents.get(name) == now._contents.get(name)
            )
            or self._is_made_again(name, now.leaves[name])
        }
        # What was found under another name before, because that has come to refer to something else since.
        same |= {name for name in now.leaves.keys() - both if self._finds_alike(name, now)}
        same |= {name for name in self.leaves.keys() - both if now._finds_alike(name, self)}
        kinds = self._kinds.keys() | now._kinds.keys()
        replaced = {name for name in kinds if is_replaced(self._kinds.get(name), now._kinds.get(name))}
        replaced |= {name for name in self._aliases.keys() & now._aliases.keys() if self._refers_elsewhere(name, now)}
        replaced |= now._refers_newly(self) | self._refers_newly(now)
        replaced |= {name for name, flag in now._trained.items() if self._trained.get(name, flag) != flag}
        in_optimizers = {own for own, _ in now.in_optimizers()} if now._gradients else set()
        for name in self._gradients.keys() & now._gradients.keys():
            (before, version_before), (gradient, version) = self._gradients[name], now._gradients[name]
            if name.removesuffix(GRADIENT) in in_optimizers or _GROUPS in name:
                if before is gradient and version_before != version:  # it has been added to
                    replaced.add(name)
            elif now._is_bare(name) and bool(
                gradient.count_nonzero()
            ):  # who gave it none to step it reads its gradient
                replaced.add(name)
        filled = {  # what was None and holds something now, which has names of its own
            name
            for name in self.leaves.keys() & now._kinds.keys() - now.leaves.keys()
            if self.leaves[name] is None and any(leaf.startswith((f"{name}.", f"{name}, ")) for leaf in now.leaves)
        }
        return sorted(((self.leaves.keys() | now.leaves.keys()) - same - filled) | replaced)

    def _is_made_again(self, name: str, leaf: Any) -> bool:
        """Whether a tensor was replaced by an equal one, such as a mask made in each step, or moved to a device."""
        was = self.leaves[name]
        return (
            isinstance(was, Tensor)
            and isinstance(leaf, Tensor)
            and was is not leaf
            and not was.is_inference()
            and was._version == self._versions[name]
            and equal_bits(was, leaf)
        )

    def _finds_alike(self, name: str, other: Attributes) -> bool:
        """Whether a leaf of the other has another name here, and the same value."""
        for end, letter in enumerate(name):
            if letter in ".," and (first := self._aliases.get(name[:end])) is not None:
                found, value = self.leaves.get(first + name[end:]), other.leaves[name]
                return found is not None and is_same(found, value)
        return False

    def _refers_elsewhere(self, name: str, now: Attributes) -> bool:
        was, first = self._aliases[name], now._aliases[name]
        return was != first and self._objects[was] is not now._objects[first]

    def gradients(self) -> dict[int, str]:
        """The holders of tensors with a gradient, by the id of the gradient."""
        return {id(gradient): self.holders[name] for name, (gradient, _) in self._gradients.items()}

    def _is_bare(self, name: str) -> bool:
        return id(self.leaves[name.removesuffix(GRADIENT)]) not in self._of_modules

    def _refers_newly(self, other: Attributes) -> set[str]:
        """Names that the other has not, of what it has under another name; the length of a list shows its elements."""
        names = other._kinds.keys() | other.leaves.keys()
        return {
            name
            for name, first in self._aliases.items()
            if name not in names and (first in other._kinds or (first in other._known and "." in first))
            if name.rpartition(".")[0] + _LENGTH not in self.leaves
        }

    def unsaved(
        self,
        changed: Iterable[str],
        saved: Attributes,
        fresh: Container[str] | None = None,
        then: tuple[Attributes, Attributes] | None = None,
    ) -> list[str]:
        """Which of the changed names are not saved, under any name.

        Elements that have left a list are not named, because its length shows the change. A value may be in the state
        by chance: one that many things have, such as True, counts only where the state has changed, too; and that of a
        single attribute, such as the last loss, counts in a list or dict, such as that of all losses, only where it
        was before.

        Parameters
        ----------
        saved, fresh
            What the state holds, and the names there of what has changed as well; None: all.
        then
            What these were compared with, and what the state held then.
        """
        lists = {name.removesuffix(_LENGTH) for name in self.leaves if name.endswith(_LENGTH)}
        leaves = saved.leaves
        changed_there = {key: leaf for key, leaf in leaves.items() if fresh is None or key in fresh}

        def was_there(name: str, place: str) -> bool:
            if then is None or name not in then[0].leaves or _is_element(name):
                return True
            whole, held = place.partition(", ")[0], then[1].leaves
            if not held.keys().isdisjoint((place, whole, whole + _LENGTH)):
                marks = then[0]._mark(name), then[1]._mark(place)
                return not _is_element(place) or marks[0] == marks[1] or type(marks[0]) is not type(marks[1])
            *outer, _ = accumulate(place.split("."), "{}.{}".format)
            return len(outer) == 1 or any(held.get(whole, place) is None for whole in outer)

        def is_held(value: Any, name: str) -> bool:
            if isinstance(value, enum.Enum):
                return is_held(value.name, name) or is_held(value.value, name)
            if not is_common(value):
                is_number = isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta
                forms = (value, value.item()) if is_number else (value,)
                places = (place for form in forms for place, leaf in leaves.items() if _is_alike(form, leaf))
            else:
                places = (place for place, leaf in changed_there.items() if is_common(leaf) and value == leaf)
            return any(was_there(name, place) for place in places)

        def is_saved(name: str) -> bool:
            if name.endswith(GRADIENT):
                return is_held(self._gradients[name][0], name)
            if name.endswith(_TRAINED):  # the state may say whether it is frozen
                return any(isinstance(leaf, bool) for leaf in changed_there.values())
            if name in self._aliases:  # the state may have it, or its place in a list, or its key in a dict
                key = self._aliases[name].rpartition(".")[2]
                if name in saved.leaves or name in saved._aliases:
                    return True
                return is_held(key, name) or (key.isdecimal() and is_held(int(key), name))
            if name in self.leaves:
                return is_held(self.leaves[name], name)
            has_left = name not in self._kinds
            return has_left and any(name[:end] in lists for end, letter in enumerate(name) if letter == ".")

        return [name for name in changed if not is_saved(name)]

    def owner(self, name: str) -> int | None:
        """The id of the innermost object, in the task or the model, that a leaf belongs to; None: to these themselves."""
        *outer, _ = accumulate(name.split("."), "{}.{}".format)
        return next((self._owners[whole] for whole in reversed(outer[1:]) if whole in self._owners), None)

    @functools.cached_property
    def _owners(self) -> dict[str, int]:
        return {name: key for key, name in self._seen.items() if isinstance(name, str)}

    def _mark(self, name: str) -> Any:
        """What tells the value that a leaf had from others."""
        leaf = self.leaves.get(name)
        return self._contents.get(name) if leaf is None or isinstance(leaf, Tensor) else repr(leaf)

    def in_optimizers(self) -> set[tuple[str, str]]:
        """The names of tensors that optimizers hold and something else does, too: its name there, and theirs."""
        tensors = ((first, name) for name, first in self._aliases.items() if isinstance(self._objects[first], Tensor))
        pairs = {tuple(sorted(pair, key=lambda name: _GROUPS in name)) for pair in tensors}
        return {(own, held) for own, held in pairs if _GROUPS in held and _GROUPS not in own}

    def changed_by_both_names(self, now: Attributes) -> set[str]:
        """Second names of what a later snapshot has under the same names, and what has changed in place."""
        changed = self.changed(now)
        return {
            name
            for name, first in now._aliases.items()
            if self._objects.get(self._aliases.get(name, "")) is now._objects[first]
            and any(other == first or other.startswith((f"{first}.", f"{first}, ")) for other in changed)
        }

    def is_lost(self, name: str, was: Attributes, again: Attributes) -> bool:
        """Whether a number or tensor would be another after a resume, or a number what is and was a tensor."""
        leaf, loaded = self.leaves.get(name), again.leaves.get(name)
        if isinstance(leaf, Tensor) and type(loaded) is float:
            return isinstance(was.leaves.get(name), Tensor)
        are_numbers = type(leaf) is type(loaded) is float or (isinstance(leaf, Tensor) and isinstance(loaded, Tensor))
        return are_numbers and not self.has_alike(name, again)

    def is_value(self, name: str) -> bool:
        """Whether it is a number, a string or the like itself, and not only compared by one."""
        return name in self.leaves and name not in self._kinds

    def has_alike(self, name: str, again: Attributes) -> bool:
        """Whether a leaf has the same value, or a tensor the same bits, after a resume."""
        leaf, loaded = self.leaves.get(name), again.leaves[name]
        if isinstance(leaf, Tensor) and isinstance(loaded, Tensor):
            return equal_bits(leaf, loaded)
        return is_same(leaf, loaded)

    def aliases_lost(self, now: Attributes) -> set[str]:
        """Second names that refer to something else in a later snapshot."""
        return {name for name, first in self._aliases.items() if now._aliases.get(name) != first}

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
        first = self._seen.setdefault(id(value), name)
        if first is not name and (may_take_turns(value) or isinstance(value, GENERATORS)):
            self._aliases[name], self._objects[first] = first, value
            return
        if first is not name and not isinstance(value, _COPIED):
            return
        with contextlib.suppress(Exception):  # it may have no attributes, or be no list, despite its class
            self._look_at(name, value, depth)

    def _look_at(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.leaves[name] = value
            self._versions[name] = 0 if value.is_inference() else value._version
            if value.is_leaf and id(value) not in self._of_modules:
                self._trained[name + _TRAINED] = value.requires_grad
            if value.is_leaf and value.grad is not None:
                self._gradients[name + GRADIENT] = value.grad, value.grad._version
            self._look_into({**of_tensor(value), **hooks_of_tensor(value)}.items(), name, depth)
            return
        if isinstance(value, CONTAINERS) and hasattr(value, "__dict__"):  # of a derived class
            self._look_into(vars(value).items(), name, depth)
        if isinstance(value, np.generic):
            self.leaves[name] = value.item()  # which state_dict() may return
        elif isinstance(value, np.ndarray):
            # A read-only one, such as a memory-mapped file, may be larger than the memory.
            self.leaves[name] = fingerprint(value) if value.flags.writeable else repr(value)
        elif isinstance(value, GENERATORS):  # once seeded, its state follows from the step
            is_seeded = self._seeded is None or value in self._seeded
            self.leaves[name] = _GENERATOR if is_seeded else place_of_generator(value)
        elif isinstance(value, np.random.SeedSequence):
            self.leaves[name] = repr(value.state)
        elif isinstance(value, dict):
            items = list(dict.items(value))
            keys = range(len(items)) if are_hooks(value) else [self._key(key, n) for n, (key, _) in enumerate(items)]
            parts = [part for _, part in items]
            self._look_into(zip(keys, parts, strict=False), name, depth)
            self._skim(name, items[_WIDTH:_FAR], parts[_WIDTH:_FAR], depth)
        elif isinstance(value, (list, tuple, collections.deque)):
            self.leaves[f"{name}{_LENGTH}"] = length(value)
            parts = list(islice(elements(value), _FAR))
            self._look_into(enumerate(parts), name, depth)
            self._skim(name, parts[_WIDTH:], parts[_WIDTH:], depth)
        elif isinstance(value, (set, frozenset)):
            parts = list(islice(elements(value), _FAR))
            self.leaves[f"{name}, its elements"] = length(value), hash(frozenset(filter(is_plain, parts)))
            self._look_into(enumerate(part for part in parts if not is_plain(part)), name, depth)
        elif isinstance(value, ctypes._SimpleCData) and is_value(value.value):
            self.leaves[name] = value.value  # which state_dict() may return
        elif isinstance(value, _BYTES):
            self.leaves[name] = bytes(value)
        elif isinstance(value, SynchronizedBase):  # such as a multiprocessing.Value, by which workers are sent a level
            self._look(name, value.get_obj(), depth)
        elif is_iterator(value):
            self.leaves[name] = place_of(value)
        elif isinstance(value, nn.Module):
            self._of_modules.update(map(id, value.parameters()))
            for prefix, module in value.named_modules():
                held = {**of_module(module), **module._parameters, **module._buffers}
                self._look_into(held.items(), f"{name}.{prefix}".removesuffix("."), depth)
        elif isinstance(value, Dataset) and not isinstance(value, IterableDataset):
            # What a step may set in it, such as a level of difficulty; nothing large, and no files that are opened
            # late.
            self._look_into([(key, part) for key, part in vars(value).items() if is_small(part)], name, depth)
        elif isinstance(value, (Event, threading.Event)):
            self.leaves[name] = value.is_set()
        elif isinstance(value, _VALUES):
            self.leaves[name] = repr(value)
        elif isinstance(value, io.TextIOBase):  # a binary one is often read at any place
            if value.readable() and value.seekable() and not value.writable():
                self.leaves[name] = place_in_file(value)
        elif callable(getattr(type(value), "to_numpy", None)):  # a pandas or polars frame or series
            self.leaves[name] = fingerprint(value[:: len(value) // _ROWS + 1].to_numpy())
        elif isinstance(value, SEEN_INTO) or not is_of_library(value):
            but = recomputed(value)
            inner = [(key, part) for key, part in inner_parts(value) if key not in but]
            self._look_into(inner, name, depth)
            self._skim(name, inner[_WIDTH:], [part for _, part in inner[_WIDTH:]], depth)

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


def _is_alike(value: Any, leaf: Any) -> bool:
    return is_same(value, leaf) or (isinstance(value, Tensor) and isinstance(leaf, Tensor) and equal_bits(value, leaf))


def _is_element(name: str) -> bool:
    """Whether it is in a list, or in a dict by a number."""
    return any(part.isdecimal() for part in name.split("."))
