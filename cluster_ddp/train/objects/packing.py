"""Converts nested values to JSON and named tensors, and back, preserving types, keys and bits.

JSON has neither tuples nor numbers as keys, so a value that it would change is written as an object whose key ``!``
gives its type. Only the types listed here are read back; nothing that is read is ever called.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cluster_ddp.checkpoint.plan import memory_of
from cluster_ddp.train.buffers import written_once
from cluster_ddp.train.errors import TaskError

_MARK = "!"
_PLAIN = (bool, int, float, str)
_WIDTH = 100  # how many elements of lists and dicts are searched for sets
_LARGEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}  # bytes of an element of an array
_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_DICTS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": lambda items: collections.Counter(dict(items)),
}
_KINDS: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
}


class Packer:
    """Packs values; `tensors` collects the live tensors found so far, each under a unique name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def pack(self, value: Any, name: str) -> Any:
        """Return a value's JSON, adding its tensors to `tensors` under names starting with `name`; or a `TaskError`."""
        kind = type(value)
        if value is None or kind in _PLAIN:
            return value
        if kind is list:
            return [self.pack(item, f"{name}.{number}") for number, item in enumerate(value)]
        if kind is dict and _MARK not in value and all(type(key) is str for key in value):
            return {key: self.pack(item, f"{name}.{key}") for key, item in value.items()}
        if kind in (Tensor, nn.Parameter):
            if value.is_nested:
                raise TaskError(
                    f"{name} is a nested tensor, which a checkpoint cannot contain: keep the list of its parts, "
                    "list(tensor.unbind())"
                )
            return self._reference(value.detach().resolve_conj().resolve_neg(), name)
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
            if not value.dtype.isnative or value.dtype.itemsize > _LARGEST[value.dtype.kind]:
                raise TaskError(
                    f"{name} is an array of dtype {value.dtype!r}, which torch does not support, so it cannot be "
                    "saved: convert it to another one, for example array.astype(np.float64)"
                )
            what = "array" if kind is np.ndarray else "scalar"
            return {**self._reference(torch.from_numpy(np.array(value)), name), "numpy": what}
        if kind is collections.deque:
            return {_MARK: "deque", "of": self.pack(list(value), name), "most": value.maxlen}
        if kind is torch.dtype:
            return {_MARK: "dtype", "of": str(value).removeprefix("torch.")}
        if kind is bytes:  # such as the schedule of heavyball's optimizers
            raise TaskError(
                f"{name} is a bytes object, which a checkpoint does not hold, because bytes are mostly pickles, and "
                "reading those could run code: keep tensors, numbers or strings. If it belongs to a library's "
                "optimizer, use a different optimizer"
            )
        if kind not in _KINDS:
            plain = ", and a plain tuple(...) instead of one with names" if isinstance(value, tuple) else ""
            raise TaskError(
                f"{name} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot contain: keep "
                f"tensors, numbers, strings, or lists and dicts of these{plain}"
            )
        if not isinstance(value, dict):
            return {_MARK: _KINDS[kind], "of": self.pack(list(value), name)}
        keys = (key if type(key) in (str, int) else number for number, key in enumerate(value))
        items = zip((f"{name}.{key}" for key in keys), value.items(), strict=True)
        return {_MARK: _KINDS[kind], "of": [[self.pack(part, of) for part in item] for of, item in items]}

    def _reference(self, tensor: Tensor, name: str) -> dict[str, Any]:
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        found: dict[str, Any] = {_MARK: "tensor", "of": name}
        if tensor.layout is torch.strided and tensor.stride() != contiguous_strides(tensor.shape):
            found["strides"] = list(tensor.stride())
        if tensor.device.type != "cpu":
            found["device"] = True
        return found


def is_packed(value: Any, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a value has the form that `Packer.pack` returns, with tensors of these shapes; types may be unknown."""
    if isinstance(value, list):
        return all(is_packed(item, shapes) for item in value)
    if not isinstance(value, dict):
        return True
    if _MARK not in value:
        return all(is_packed(item, shapes) for item in value.values())
    kind, content = value[_MARK], value.get("of")
    if type(kind) is not str:
        return False
    if kind == "tensor":
        shape = shapes.get(content) if type(content) is str else None
        return shape is not None and ("strides" not in value or are_strides(value["strides"], shape))
    if kind == "dtype":
        return type(content) is str
    if kind == "deque":
        most = value.get("most")
        return isinstance(content, list) and is_packed(content, shapes) and (most is None or type(most) is int)
    if kind in _DICTS and not (isinstance(content, list) and all(_is_item(item) for item in content)):
        return False
    if kind in ("set", "frozenset") and not (isinstance(content, list) and all(map(_is_key, content))):
        return False
    return kind not in {*_LISTS, *_DICTS} or (isinstance(content, list) and is_packed(content, shapes))


def comparable(packed: Any) -> Any:
    """The same without device flags and the order of sets, so that a copy of the value on another device is equal."""
    if isinstance(packed, list):
        return [comparable(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if packed.get(_MARK) in ("set", "frozenset"):
        return {**packed, "of": sorted(json.dumps(comparable(item), sort_keys=True) for item in packed["of"])}
    return {key: comparable(item) for key, item in packed.items() if not (key == "device" and _MARK in packed)}


def without_strides(packed: Any) -> Any:
    """Packed values without how tensors lie in memory."""
    if isinstance(packed, list):
        return [without_strides(part) for part in packed]
    if not isinstance(packed, dict):
        return packed
    return {key: without_strides(part) for key, part in packed.items() if not (key == "strides" and _MARK in packed)}


def sets_out_of_order(value: Any, name: str) -> Iterator[str]:
    """The names of sets in a state whose copies have another order, which depends on how they came about.

    Of long lists and dicts, only the first elements are looked at.
    """
    if isinstance(value, (set, frozenset)):
        if (elements := list(value)) != list(set(elements)):
            yield name
    elif isinstance(value, Mapping):
        for key, part in islice(value.items(), _WIDTH):
            yield from sets_out_of_order(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple, collections.deque)):
        for number, part in enumerate(islice(value, _WIDTH)):
            if not isinstance(part, _PLAIN):
                yield from sets_out_of_order(part, f"{name}.{number}")


def are_strides(strides: Any, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape may have these strides."""
    return (
        isinstance(strides, list)
        and len(strides) == len(shape)
        and all(type(stride) is int and 0 <= stride < 1 << 48 for stride in strides)
    )


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and _is_key(item[0])


def _is_key(packed: Any) -> bool:
    """Whether a packed value can be a key of a dict, or an element of a set."""
    if isinstance(packed, dict):
        return packed.get(_MARK) not in (None, "deque", "set", "dict", "ordered", "counter")
    return not isinstance(packed, list)


class Unpacker:
    """Restores packed values.

    Parameters
    ----------
    device
        Where to put tensors that were not on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: dict[tuple[object, tuple[int, ...], torch.device], tuple[Tensor, Tensor]] = {}

    def unpack(self, packed: Any, take: Callable[[str], Tensor]) -> Any:
        """Restore a packed value; `take` returns its tensors by name, on the CPU, and they become part of the value."""
        if isinstance(packed, list):
            return [self.unpack(item, take) for item in packed]
        if not isinstance(packed, dict):
            return packed
        if _MARK not in packed:
            return {key: self.unpack(item, take) for key, item in packed.items()}
        kind, content = packed[_MARK], packed["of"]
        if kind == "tensor":
            return self._tensor(take(content), packed)
        if kind == "dtype" and isinstance(dtype := getattr(torch, content, None), torch.dtype):
            return dtype
        if kind == "deque":
            return collections.deque(self.unpack(content, take), packed["most"])
        if kind in _LISTS:
            return _LISTS[kind](self.unpack(content, take))
        if kind in _DICTS:
            return _DICTS[kind]([(key, value) for key, value in self.unpack(content, take)])
        raise TaskError(
            f"the checkpoint contains a value of kind {kind!r}, which this version of cluster_ddp does not know: "
            "resume with the version that saved it"
        )

    def _tensor(self, tensor: Tensor, packed: Mapping[str, Any]) -> Any:
        where = self._device if packed.get("device") else tensor.device
        tensor = self.laid_out(tensor, tuple(packed.get("strides", tensor.stride())), where)
        if "numpy" in packed:
            return tensor.numpy() if packed["numpy"] == "array" else tensor.numpy()[()]
        return tensor

    def laid_out(self, tensor: Tensor, strides: tuple[int, ...], device: torch.device) -> Tensor:
        """The same values with these strides on this device; the tensor itself if it already has them.

        Tensors that shared memory become one tensor again, wherever they are in the state.
        """
        if tensor.stride() == strides and tensor.device == device:
            return tensor
        asked = (memory_of(tensor) or id(tensor), strides, device)
        if asked not in self._done:
            made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
            once = written_once(made)
            once.copy_(tensor[tuple(map(slice, once.shape))])
            self._done[asked] = tensor, made  # kept alive, so that no other tensor reuses its address
        return self._done[asked][1]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def without_words(packed: Any) -> Any:
    """Packed values without strings, such as the name of a host, and without sets, which come back in any order."""
    if isinstance(packed, list):
        return [without_words(part) for part in packed]
    if isinstance(packed, dict):
        is_set = packed.get(_MARK) in ("set", "frozenset")
        return None if is_set else {key: without_words(part) for key, part in packed.items()}
    return None if isinstance(packed, str) else packed
