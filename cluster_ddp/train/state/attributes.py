"""What objects keep in plain attributes: by it is seen what changes in training and is not in the checkpoint."""

from __future__ import annotations

import argparse
import array
import collections
import ctypes
import functools
import inspect
import io
import itertools
import operator
import queue
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.checkpoint.replicas import INTEGERS
from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.inner_parts import inner_parts
from cluster_ddp.train.randomness import GENERATORS
from cluster_ddp.train.state.contents import contents
from cluster_ddp.train.state.plain import is_device

_DEPTH, _WIDTH = 6, 100  # how deep in an object is looked, and in how long lists part by part
_FAR = 1_000_000  # how far in longer ones, where only numbers and strings are seen
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_NOT_BEGUN, _ENDED, _GENERATOR = "not begun", "ended", "a random generator"
# Besides, Lightning's, and what transformers' Trainer sets for the time of the training.
_OF_MODULES = frozenset(vars(nn.Module())) | {"_trainer", "_current_fx_name", "neftune_noise_alpha"}
# What it drew last, and what it did by that.
_OF_KORNIA = {
    "_params", "_transform_matrix", "_transform_matrices", "_transform_matrix_params", "_lazy_matrix_args",
    "_transform_matrix_params_snapshot", "_output_image", "transform_op",
}  # fmt: skip
_LIBRARIES = {"torch", "numpy", "cluster_ddp", "lightning", "transformers", "accelerate", *sys.stdlib_module_names}
_BYTES = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
# Of libraries, and yet looked into: what moves by itself, and what holds whatever is put there.
_SEEN_INTO = (
    Optimizer, LRScheduler, _BaseDataLoaderIter,
    argparse.Namespace, types.SimpleNamespace, queue.Queue, collections.UserDict, collections.UserList,
    collections.ChainMap,
)  # fmt: skip


class Attributes:
    """Numbers, strings and tensors that objects hold, as they are now, by name.

    Parameters
    ----------
    holders
        The objects, by name.
    known
        Ids of what is passed over wherever it is found: what is saved anyway.
    names
        Of tensors that are keys of dicts, by their ids.
    """

    def __init__(
        self, holders: Mapping[str, Any], known: Iterable[int] = (), names: Mapping[int, str] | None = None
    ) -> None:
        self.leaves: dict[str, Any] = {}
        self._versions: dict[str, int] = {}
        self._seen = set(known)
        self._names = names or {}
        self.holders: dict[str, str] = {}  # by the names of leaves
        for name, holder in holders.items():
            known_before = len(self.leaves)
            self._look(name, holder, 0)
            self.holders.update(dict.fromkeys(islice(self.leaves, known_before, None), name))
        tensors = ((name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, Tensor))
        self._contents = contents(tensors)

    def add(self, other: Attributes) -> None:
        """Take in what was found elsewhere, under other names."""
        self.leaves |= other.leaves
        self.holders |= other.holders
        self._versions |= other._versions
        self._contents |= other._contents

    def changed(self, now: Attributes) -> list[str]:
        """Names of what is another value, or has another, in what was found later, or came or went."""
        both = self.leaves.keys() & now.leaves.keys()
        same = {
            name
            for name in both
            if is_same(self.leaves[name], now.leaves[name])
            and self._versions.get(name) == now._versions.get(name)
            and self._contents.get(name) == now._contents.get(name)
        }
        return sorted((self.leaves.keys() | now.leaves.keys()) - same)

    def holds(self, value: Any) -> bool:
        """Whether the same value is among these, under whatever name."""
        return any(
            is_same(value, leaf) or (isinstance(value, Tensor) and isinstance(leaf, Tensor) and equal_bits(value, leaf))
            for leaf in self.leaves.values()
        )

    def _look(self, name: str, value: Any, depth: int) -> None:
        if type(value) in _PLAIN:
            self.leaves[name] = value
            return
        if id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.leaves[name] = value
            self._versions[name] = 0 if value.is_inference() else value._version
            return
        if isinstance(value, _CONTAINERS) and hasattr(value, "__dict__"):  # of a class derived from them
            self._look_into(vars(value).items(), name, depth)
        if isinstance(value, (np.ndarray, np.generic)):
            # One that cannot be written, as a file that is mapped into memory, may be larger than the memory.
            self.leaves[name] = fingerprint(value) if value.flags.writeable else repr(value)
        elif isinstance(value, GENERATORS):  # where it is follows from the step, once it is there
            self.leaves[name] = _GENERATOR
        elif isinstance(value, dict):
            keys = _positions(value) if are_hooks(value) else [self._key(key, n) for n, key in enumerate(value)]
            self._look_into(zip(keys, list(value.values()), strict=False), name, depth)
            self._skim(name, list(islice(value.items(), _WIDTH, _FAR)))
        elif isinstance(value, (list, tuple, collections.deque)):
            self.leaves[f"{name}, its length"] = len(value)
            self._look_into(zip(_positions(value), list(value), strict=False), name, depth)
            self._skim(name, list(islice(value, _WIDTH, _FAR)))
        elif isinstance(value, (set, frozenset)):
            self.leaves[f"{name}, its elements"] = len(value), hash(frozenset(filter(_is_plain, islice(value, _FAR))))
        elif isinstance(value, _BYTES):
            self.leaves[name] = bytes(value)
        elif isinstance(value, SynchronizedBase):  # as a multiprocessing.Value, by which workers are told a level
            self._look(name, value.get_obj(), depth)
        elif _is_iterator(value):
            self.leaves[name] = _place_of(value)
        elif isinstance(value, nn.Module):
            for prefix, module in value.named_modules():
                parts = {**of_module(module), **module._parameters, **module._buffers}
                self._look_into(parts.items(), f"{name}.{prefix}".removesuffix("."), depth)
        elif isinstance(value, Dataset) and not isinstance(value, IterableDataset):
            # What a step may set in it, as a level of difficulty; not what is large, nor a file that is opened late.
            self._look_into([(key, part) for key, part in vars(value).items() if _is_small(part)], name, depth)
        elif isinstance(value, _SEEN_INTO) or not _is_of_library(value):
            self._look_into(inner_parts(value), name, depth)

    def _look_into(self, parts: Iterable[tuple[str, Any]], name: str, depth: int) -> None:
        for key, part in islice(parts, _WIDTH):
            self._look(f"{name}.{key}", part, depth + 1)

    def _skim(self, name: str, rest: list[Any]) -> None:
        """Take in the numbers and strings of the rest of a long list or dict, as one."""
        plain = (None if part != part else part for part in filter(_is_plain, rest))  # no NaN has the same hash
        if seen := tuple(plain):  # not of parameters with empty states, which do not come back and need not
            self.leaves[f"{name}, the rest"] = hash(seen)

    def _key(self, key: Any, number: int) -> str:
        return self._names.get(id(key), str(number)) if isinstance(key, Tensor) else str(key)


class _Place:
    """Where an iterator is that does not show it: it has to be taken for another each time."""

    def __repr__(self) -> str:
        return "somewhere"


def of_module(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module itself, without what every module has, but with hooks and `enclosing_methods`."""
    but = _made_anew(module)
    own = {key: value for key, value in vars(module).items() if key not in _OF_MODULES or (value and are_hooks(value))}
    return {**enclosing_methods(module), **{key: value for key, value in own.items() if key not in but}}


def _made_anew(module: nn.Module) -> set[str]:
    """The attributes that each forward pass sets before it reads them."""
    names = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
    of_kornia = any(kind.__module__.partition(".")[0] == "kornia" for kind in type(module).__mro__)
    return names | _OF_KORNIA if of_kornia else names


def enclosing_methods(value: object) -> dict[str, FunctionType]:
    """The methods that have closed over something, as those of a class that was made in a function may."""
    return {
        name: method
        for kind in reversed(type(value).__mro__)
        if not is_library(kind.__module__)
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and method.__closure__
    }


def equal_bits(was: Tensor, now: Tensor) -> bool:
    """Whether two tensors, on whatever devices, have the same dtype, shape and bits; NaN equals itself."""
    if (was.dtype, was.shape, was.layout) != (now.dtype, now.shape, now.layout):
        return False
    if was.layout is not torch.strided:
        was, now = was.to_dense(), now.to_dense()
    parts = [
        torch.view_as_real(part) if part.is_complex() else part for part in (was.detach().cpu(), now.detach().cpu())
    ]
    kind = INTEGERS[parts[0].element_size()]
    return torch.equal(parts[0].view(kind), parts[1].view(kind))


def is_same(was: Any, now: Any) -> bool:
    """Whether two leaves are one value; of tensors, whether they are one tensor."""
    if isinstance(was, (Tensor, _Place)) or isinstance(now, (Tensor, _Place)):
        return was is now
    return was is now or (type(was) is type(now) and repr(was) == repr(now))


def difference(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """How a leaf differs from the one of this name that a resume has; None: it does not."""
    was, now = mine.get(name), theirs.get(name)
    if name not in theirs or name not in mine:
        if any(isinstance(value, Tensor) or type(value) in (int, float) for value in (was, now)):
            return "does not come back" if name in mine else "comes back though it was not there"
    elif isinstance(was, Tensor) and isinstance(now, Tensor):
        if not equal_bits(was, now):
            return "other values come back"
    elif not is_same(was, now) and not (is_device(was) and is_device(now)):  # it is compared on the CPU
        return f"{_short(was)} now, {_short(now)} after a resume"
    return None


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def are_hooks(value: Any) -> bool:
    """Whether these are hooks of a module or an optimizer; their keys are others in each process."""
    return type(value) is collections.OrderedDict and all(type(key) is int for key in value)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _is_small(part: Any, depth: int = _DEPTH) -> bool:
    if isinstance(part, (list, tuple)):
        return depth > 0 and len(part) <= _WIDTH and all(_is_small(inner, depth - 1) for inner in part)
    if isinstance(part, np.ndarray):
        return part.nbytes <= _FAR
    if isinstance(part, (str, bytes)):  # as the whole text that a language model trains on
        return len(part) <= _FAR
    return isinstance(part, (Tensor, Dataset, SynchronizedBase)) or (part is not None and type(part) in _PLAIN)


def _positions(parts: Collection[Any]) -> list[str]:
    return [str(number) for number in range(len(parts))]


def _is_iterator(value: Any) -> bool:
    of_python = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return of_python and hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _place_of(iterator: Any) -> Any:
    """Where an iterator is, without moving it on: those of lists and ranges show how much is left."""
    state = inspect.getgeneratorstate(iterator) if inspect.isgenerator(iterator) else None
    if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED):
        return _NOT_BEGUN if state == inspect.GEN_CREATED else _ENDED
    if type(iterator) is itertools.count:
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return _Place() if left < 0 else left


def _is_of_library(value: Any) -> bool:
    if isinstance(value, (functools.partial, MethodType)):
        return False  # what they hold is looked at in its turn
    named = value if isinstance(value, FunctionType) else type(value)
    return isinstance(value, (Dataset, type)) or is_library(named.__module__)


def is_library(module: str | None) -> bool:
    """Whether a module is one of those whose variables no user's code changes."""
    return str(module).partition(".")[0] in _LIBRARIES
