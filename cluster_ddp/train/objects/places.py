"""Finds out where random generators, iterators and files stand, without moving them, and where tensors lie."""

from __future__ import annotations

import inspect
import io
import itertools
import operator
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cluster_ddp.checkpoint.plan import memory_of
from cluster_ddp.train.data.fingerprint import drawn_to
from cluster_ddp.train.objects.comparing import Place

_NOT_BEGUN, _ENDED = "not begun", "ended"


def place_of_generator(generator: Any) -> Any:
    """The position of a random generator, by its state."""
    return Place() if isinstance(generator, random.SystemRandom) else drawn_to(generator)


def number_of_children(generator: Any) -> int:
    """How many generators one of NumPy's has spawned, on which the next ones depend, however it is seeded."""
    bits = getattr(generator, "bit_generator", generator)
    return int(getattr(getattr(bits, "seed_seq", None), "n_children_spawned", 0))


def is_iterator(value: Any) -> bool:
    """Whether it is one of Python's own iterators, other than a file."""
    of_python = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return of_python and hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def place_of(iterator: Any) -> Any:
    """The position of an iterator, without advancing it: those of lists and ranges show how much is left."""
    state = inspect.getgeneratorstate(iterator) if inspect.isgenerator(iterator) else None
    if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED):
        return _NOT_BEGUN if state == inspect.GEN_CREATED else _ENDED
    if type(iterator) is itertools.count:
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return Place() if left < 0 else left


def place_in_file(file: io.TextIOBase) -> Any:
    """The position in a text file; unknown while it is iterated over."""
    try:
        return file.tell()
    except OSError:
        return Place()


def place_of_tensor(tensor: Tensor) -> tuple[object, ...] | None:
    """What is the same for another view of all of the tensor, such as its ``.data``; None if it has no memory."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)
    return memory_of(tensor) if is_plain else None


def names_in(modules: Mapping[str, nn.Module]) -> dict[Any, str]:
    """The names of modules and of their parameters and buffers, by id, and of these by their places as well."""
    names: dict[Any, str] = {}
    for name, module in modules.items():
        held = {f"{name}.{key}": tensor for key, tensor in {**module._parameters, **module._buffers}.items()}
        names |= {place_of_tensor(tensor): key for key, tensor in held.items() if tensor is not None}
        names |= {id(module): name} | {id(tensor): key for key, tensor in held.items()}
    names.pop(None, None)  # that of empty tensors
    return names
