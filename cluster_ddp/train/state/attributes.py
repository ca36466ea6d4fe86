"""Compares what objects keep in plain attributes, to find what training changes and no checkpoint contains."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import ctypes
import functools
import inspect
import io
import itertools
import numbers
import operator
import queue
import random
import sys
import threading
import types
from collections.abc import Container, Iterable, Mapping
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import Event
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.train.data.fingerprint import drawn_to, fingerprint
from cluster_ddp.train.inner_parts import CONTAINERS, PLAIN, can_be_seen, elements, inner_parts, length
from cluster_ddp.train.randomness import GENERATORS
from cluster_ddp.train.state.comparing import Place, equal_bits, is_same
from cluster_ddp.train.state.contents import contents

_DEPTH, _WIDTH = 10, 100  # how deep objects are searched, and how many elements of lists one by one
_FAR = 1_000_000  # the limit for longer ones, of which numbers and strings are hashed together, and the rest sampled
_ROWS = 4096  # rows of a data frame that are compared
_LENGTH = ", its length"
_NOT_BEGUN, _ENDED, _GENERATOR = "not begun", "ended", "a random generator"
# Also the marks of torch.compile and Lightning, and what transformers' Trainer sets during training.
_OF_MODULES = frozenset(vars(nn.Module())) | {
    "_is_torch_compile", "_trainer", "_current_fx_name", "neftune_noise_alpha",
}  # fmt: skip
# By package: attributes that objects recompute whenever they need them, such as kornia's last random draw and its
# results. And sentence-transformers' model card, which is for people only.
_MADE_ANEW = {
    "kornia": {
        "_params", "_transform_matrix", "_transform_matrices", "_transform_matrix_params", "_lazy_matrix_args",
        "_transform_matrix_params_snapshot", "_output_image", "transform_op",
    },
    "gpytorch": {"_memoize_cache"},
    "linear_operator": {"_memoize_cache"},
    "omegaconf": {"_flags_cache"},
    "sentence_transformers": {"model_card_data"},
}  # fmt: skip
# Not state: flags for torch's warnings and checks, what a step is told about its own gradients, and the number of
# elements of LBFGS's parameters.
NOT_STATE_OF_OPTIMIZERS = frozenset(
    {
        "_step_count", "_opt_called", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused",
        "found_inf", "grad_scale", "_numel_cache",
    }
)  # fmt: skip
_LIBRARIES = {"torch", "numpy", "cluster_ddp", "lightning", "transformers", "accelerate", *sys.stdlib_module_names}
_BYTES = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
# From libraries, but searched anyway: what changes by itself, and containers for arbitrary things.
_SEEN_INTO = (
    Optimizer, LRScheduler, _BaseDataLoaderIter, torch.amp.GradScaler, torch.quasirandom.SobolEngine,
    argparse.Namespace, types.SimpleNamespace, queue.Queue, collections.UserDict, collections.UserList,
    collections.ChainMap, threading.local,
)  # fmt: skip
# Which one of several a name refers to matters, such as the network that is the teacher for now.
_REFERRED_TO = (nn.Module, Optimizer, Tensor)
# From libraries, with a complete repr().
_VALUES = (numbers.Number, range, slice, PurePath, torch.dtype, torch.device, torch.memory_format)


class Attributes:
    """The numbers, strings and tensors that objects hold at the moment, by name.

    Parameters
    ----------
    holders
        The objects, by name.
    known
        Ids of objects to skip, because they are saved anyway.
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
        known: Iterable[int] = (),
        names: Mapping[int, str] | None = None,
        seeded: Container[Any] | None = None,
        earlier: Attributes | None = None,
    ) -> None:
        self.leaves: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._kinds: dict[str, Any] = {}  # a non-plain value may be replaced by something with the same leaves
        self._seeded = seeded
        self._seen: dict[int, object] = {known_id: known_id for known_id in known}  # or the name of what was found
        self._names = names or {}
        self.holders: dict[str, str] = {}  # the holder of each leaf and of each entry in _kinds
        self._named_before: dict[int, object] = {} if earlier is None else earlier._seen
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
        kinds = self._kinds.keys() | now._kinds.keys()
        replaced = {name for name in kinds if _is_replaced(self._kinds.get(name), now._kinds.get(name))}
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

    def unsaved(self, changed: Iterable[str], saved: Attributes) -> list[str]:
        """Which of the changed names are not saved, under any name.

        Elements that have left a list are not named, because its length shows the change.
        """
        lists = {name.removesuffix(_LENGTH) for name in self.leaves if name.endswith(_LENGTH)}

        def is_saved(name: str) -> bool:
            if name in self.leaves:
                return saved.holds(self.leaves[name])
            has_left = name not in self._kinds
            return has_left and any(name[:end] in lists for end, letter in enumerate(name) if letter == ".")

        return [name for name in changed if not is_saved(name)]

    def holds(self, value: Any) -> bool:
        """Whether the same value is among these, under any name."""
        return any(
            is_same(value, leaf) or (isinstance(value, Tensor) and isinstance(leaf, Tensor) and equal_bits(value, leaf))
            for leaf in self.leaves.values()
        )

    def _look_from(self, holder: str, values: list[tuple[str, Any, int]]) -> None:
        before = len(self.leaves), len(self._kinds)
        for value in values:
            self._look(*value)
        for found, known in zip((self.leaves, self._kinds), before, strict=True):
            self.holders.update(dict.fromkeys(islice(found, known, None), holder))

    def _look(self, name: str, value: Any, depth: int) -> None:
        if type(value) in PLAIN:
            self.leaves[name] = value
            return
        if depth > _DEPTH or not can_be_seen(value):
            return
        self._kinds[name] = _kind_of(value)
        if id(value) in self._seen:
            if isinstance(value, _REFERRED_TO):
                self._kinds[name] = self._kinds[name], self._seen[id(value)]
            return
        if self._named_before.get(id(value), name) != name:
            self._later.append((name, value, depth))
            return
        self._seen[id(value)] = name
        with contextlib.suppress(Exception):  # it may have no attributes, or be no list, despite its class
            self._look_at(name, value, depth)

    def _look_at(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.leaves[name] = value
            self._versions[name] = 0 if value.is_inference() else value._version
            self._look_into(of_tensor(value).items(), name, depth)
            return
        if isinstance(value, CONTAINERS) and hasattr(value, "__dict__"):  # of a derived class
            self._look_into(vars(value).items(), name, depth)
        if isinstance(value, (np.ndarray, np.generic)):
            # A read-only one, such as a memory-mapped file, may be larger than the memory.
            self.leaves[name] = fingerprint(value) if value.flags.writeable else repr(value)
        elif isinstance(value, GENERATORS):  # once seeded, its state follows from the step
            is_seeded = self._seeded is None or value in self._seeded
            self.leaves[name] = _GENERATOR if is_seeded else _place_of_generator(value)
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
            self.leaves[f"{name}, its elements"] = length(value), hash(frozenset(filter(_is_plain, parts)))
            self._look_into(enumerate(part for part in parts if not _is_plain(part)), name, depth)
        elif isinstance(value, ctypes._SimpleCData) and type(value.value) in PLAIN:
            self.leaves[name] = value.value  # which state_dict() may return
        elif isinstance(value, _BYTES):
            self.leaves[name] = bytes(value)
        elif isinstance(value, SynchronizedBase):  # such as a multiprocessing.Value, by which workers are sent a level
            self._look(name, value.get_obj(), depth)
        elif _is_iterator(value):
            self.leaves[name] = _place_of(value)
        elif isinstance(value, nn.Module):
            for prefix, module in value.named_modules():
                held = {**of_module(module), **module._parameters, **module._buffers}
                self._look_into(held.items(), f"{name}.{prefix}".removesuffix("."), depth)
        elif isinstance(value, Dataset) and not isinstance(value, IterableDataset):
            # What a step may set in it, such as a level of difficulty; nothing large, and no files that are opened
            # late.
            self._look_into([(key, part) for key, part in vars(value).items() if _is_small(part)], name, depth)
        elif isinstance(value, (Event, threading.Event)):
            self.leaves[name] = value.is_set()
        elif isinstance(value, _VALUES):
            self.leaves[name] = repr(value)
        elif callable(getattr(type(value), "to_numpy", None)):  # a pandas or polars frame or series
            self.leaves[name] = fingerprint(value[:: len(value) // _ROWS + 1].to_numpy())
        elif isinstance(value, _SEEN_INTO) or not _is_of_library(value):
            made_anew = _made_anew(value)
            inner = [(key, part) for key, part in inner_parts(value) if key not in made_anew]
            self._look_into(inner, name, depth)
            self._skim(name, inner[_WIDTH:], [part for _, part in inner[_WIDTH:]], depth)

    def _look_into(self, parts: Iterable[tuple[object, Any]], name: str, depth: int) -> None:
        for key, part in islice(parts, _WIDTH):
            self._look(f"{name}.{key}", part, depth + 1)

    def _skim(self, name: str, rest: list[Any], parts: list[Any], depth: int) -> None:
        """Add the numbers and strings in the rest of a long list or dict as one hash, and a sample of other parts."""
        plain = (None if part != part else part for part in filter(_is_plain, rest))  # every NaN hashes differently
        if seen := tuple(plain):  # nothing for parameters with empty states, which are not restored and need not be
            self.leaves[f"{name}, the rest"] = hash(seen)
        for number in range(0, len(parts), -(-len(parts) // _WIDTH) or 1):
            if not _is_plain(parts[number]):
                self._look(f"{name}.{_WIDTH + number}", parts[number], depth + 1)

    def _key(self, key: Any, number: int) -> str:
        return self._names.get(id(key), str(number)) if isinstance(key, Tensor) else str(key)


def of_module(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without those that every module has, but with hooks and `enclosing_methods`."""
    but = _made_anew(module)
    own = {key: value for key, value in vars(module).items() if key not in _OF_MODULES or (value and are_hooks(value))}
    own = {key: value for key, value in own.items() if key not in but and not _is_own_method(module, key, value)}
    return {**enclosing_methods(module), **own}


def of_tensor(tensor: Tensor) -> dict[str, Any]:
    """The attributes that somebody gave a tensor or parameter, without torch's hooks and the marks of its compiler."""
    return {key: value for key, value in vars(tensor).items() if not key.startswith("_dynamo") and not are_hooks(value)}


def _is_own_method(module: nn.Module, key: str, value: object) -> bool:
    """Whether it is the class's method of this name: Lightning restores `forward` like this after each step."""
    return (
        isinstance(value, MethodType) and value.__self__ is module and value.__func__ is getattr(type(module), key, 0)
    )


def _made_anew(value: object) -> set[str]:
    """The attributes that are set before they are read; those of a module by each forward pass."""
    names = set(NOT_STATE_OF_OPTIMIZERS) if isinstance(value, Optimizer) else set[str]()
    for kind in type(value).__mro__:
        names |= _MADE_ANEW.get(kind.__module__.partition(".")[0], set())
    for hook in value._forward_pre_hooks.values() if isinstance(value, nn.Module) else ():
        if isinstance(hook, SpectralNorm):
            names.add(hook.name)
        elif isinstance(hook, BasePruningMethod):
            names.add(hook._tensor_name)
    return names


def enclosing_methods(value: object) -> dict[str, FunctionType]:
    """The methods with closures, such as those of a class that was defined inside a function."""
    return {
        name: method
        for kind in reversed(type(value).__mro__)
        if not is_library(kind.__module__)
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and method.__closure__
    }


def are_hooks(value: Any) -> bool:
    """Whether these are hooks of a module or an optimizer, whose keys differ in each process."""
    return type(value) is collections.OrderedDict and all(type(key) is int for key in value)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in PLAIN


def _is_small(part: Any, depth: int = _DEPTH) -> bool:
    if isinstance(part, (list, tuple)):
        return depth > 0 and length(part) <= _WIDTH and all(_is_small(inner, depth - 1) for inner in elements(part))
    if isinstance(part, np.ndarray):
        return part.nbytes <= _FAR
    if isinstance(part, (str, bytes)):  # such as the whole text that a language model trains on
        return len(part) <= _FAR
    return isinstance(part, (Tensor, Dataset, SynchronizedBase)) or (part is not None and type(part) in PLAIN)


def _kind_of(value: Any) -> Any:
    """What shows that a value was replaced: its class; for a function, its code; for a class, the class itself."""
    if isinstance(value, (type, BuiltinFunctionType, Distribution)):
        return value
    is_function = isinstance(value, (FunctionType, MethodType))
    return value.__code__ if is_function and not str(value.__module__).startswith("cluster_ddp.") else type(value)


def _is_replaced(was: Any, now: Any) -> bool:
    """Whether a value was replaced. If it appeared or disappeared, its leaves show that, unless it is a function."""
    return was != now and (None not in (was, now) or isinstance(was or now, (types.CodeType, BuiltinFunctionType)))


def _place_of_generator(generator: Any) -> Any:
    return Place() if isinstance(generator, random.SystemRandom) else drawn_to(generator)


def _is_iterator(value: Any) -> bool:
    of_python = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return of_python and hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _place_of(iterator: Any) -> Any:
    """The position of an iterator, without advancing it: those of lists and ranges show how much is left."""
    state = inspect.getgeneratorstate(iterator) if inspect.isgenerator(iterator) else None
    if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED):
        return _NOT_BEGUN if state == inspect.GEN_CREATED else _ENDED
    if type(iterator) is itertools.count:
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return Place() if left < 0 else left


def _is_of_library(value: Any) -> bool:
    if isinstance(value, (functools.partial, MethodType)):
        return False  # their contents are searched separately
    named = value if isinstance(value, FunctionType) else type(value)
    return isinstance(value, (Dataset, type)) or is_library(named.__module__)


def is_library(module: str | None) -> bool:
    """Whether a module is a library whose variables no user code changes."""
    return str(module).partition(".")[0] in _LIBRARIES
