"""Saves the numbers and strings that an optimizer keeps in plain attributes and that steps change."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.only_written import is_only_written
from cluster_ddp.train.objects.packing import Packer, Unpacker
from cluster_ddp.train.optimizer import parameters_of

_PLAIN = (bool, int, float, str, type(None))
_DEPTH, _MAX_LEAVES = 6, 10_000  # maximum nesting, and maximum count of numbers and strings in an attribute
_DIGITS = 11  # minimum number of digits of a memory address
_BY_PARAMETER = "by parameter"  # marks what stands for a dict whose keys are parameters
_CPU = torch.device("cpu")

Values = dict[str, dict[str, Any]]
"""By the place, which is ``self`` or ``defaults``, and the name there."""


class PlainAttributes:
    """The plain attributes and defaults of one optimizer: numbers, strings, None, and lists and dicts of these.

    The keys of a dict may be parameters, such as those of a cache of what an optimizer computes from their shapes.
    A list in the defaults may be the same object in all groups, such as the buffer of some RAdam implementations.

    Parameters
    ----------
    optimizer
        The optimizer before the first step.
    but
        Names to ignore.
    """

    def __init__(self, optimizer: Optimizer, but: frozenset[str]) -> None:
        self._optimizer, self._but = optimizer, but | {"defaults"}
        self._is_only_written = functools.cache(functools.partial(is_only_written, type(optimizer)))
        self._first = self._texts(optimizer)

    def changed(self) -> Values:
        """The attributes that changed or were added since the start, packed, without those that no method reads."""
        return {
            place: {
                name: json.loads(text)
                for name, text in texts.items()
                if text != self._first[place].get(name) and not self._is_only_written(name)
                if place == "self" or name in self._first[place]  # torch adds defaults when it loads a state
            }
            for place, texts in self._texts(self._optimizer).items()
        }

    def restore(self, changed: Values) -> None:
        """Restore what `changed` returned, filling the existing lists and dicts; raises `TaskError`."""
        for place, there in _places(self._optimizer).items():
            for name, packed in changed.get(place, {}).items():
                if not is_plain(_numbered(self._optimizer, there.get(name, getattr(self._optimizer, name, None)))):
                    raise TaskError(
                        f"the checkpoint contains a number or a string as {name} of the optimizer, which now is "
                        "something else: restore the code of the optimizer, or start a new run"
                    )
                there[name] = refilled(there.get(name), _by_parameter(self._optimizer, unpacked(packed)))

    def put_first(self, other: Optimizer) -> None:
        """Give a copy of the optimizer the values that this one had before the first step."""
        now = self._texts(other)
        for place, there in _places(other).items():
            for name in now[place].keys() - self._first[place].keys():
                del there[name]
            for name, text in self._first[place].items():
                there[name] = refilled(there.get(name), _by_parameter(other, unpacked(json.loads(text))))

    def _texts(self, optimizer: Optimizer) -> dict[str, dict[str, str]]:
        return {
            place: {
                name: _text(packable)
                for name, value in there.items()
                if name not in self._but and is_plain(packable := _numbered(optimizer, value))
            }
            for place, there in _places(optimizer).items()
        }


def is_plain(value: Any) -> bool:
    """Whether a value consists only of numbers, strings and None, and not of too many.

    Device names do not count, nor what may be an ``id()`` or an address, because they differ in another process.
    """
    if is_device(value):
        return False
    for number, leaf in enumerate(_leaves(value, _DEPTH)):  # stops at the first one that is not: there may be many
        if number == _MAX_LEAVES or not _is_number_or_text(leaf):
            return False
    return True


def put(place: dict[Any, Any], key: Any, value: Any) -> None:
    """Fill an existing tensor if it matches, or an existing list, because something else may hold it, too."""
    there = place.get(key)
    if isinstance(value, Tensor) and isinstance(there, Tensor) and _alike(value, there):
        with torch.no_grad():
            there.copy_(value)
    elif key not in place or not (is_plain(value) and is_plain(there) and _text(value) == _text(there)):
        place[key] = refilled(there, value)


def _alike(value: Tensor, there: Tensor) -> bool:
    return (
        value.dtype == there.dtype
        and value.shape == there.shape
        and value.stride() == there.stride()
        and value.device == there.device
    )


def refilled(there: Any, value: Any) -> Any:
    """Return the value, in the existing list or dict if there is one, because something else may hold that too."""
    if type(there) is not type(value) or type(value) not in (list, collections.deque, dict):
        return value
    if isinstance(value, dict):
        parts = {key: refilled(there.get(key), part) for key, part in value.items()}
        there.clear()
        there.update(parts)
    else:
        before = [*there, *[None] * len(value)]
        there.clear()
        there.extend(map(refilled, before, value))
    return there


def is_device(value: Any) -> bool:
    """Whether it is the name of a device, which may differ in another process."""
    try:
        return isinstance(value, str) and bool(torch.device(value))
    except RuntimeError:
        return False


def _places(optimizer: Optimizer) -> Mapping[str, dict[str, Any]]:
    return {"self": vars(optimizer), "defaults": getattr(optimizer, "defaults", {})}


def _numbered(optimizer: Optimizer, value: Any) -> Any:
    """For a dict whose keys are parameters, the same by their numbers; anything else as it is."""
    if type(value) is not dict or not all(isinstance(key, Tensor) for key in value) or not value:
        return value
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    if not numbers.keys() >= set(map(id, value)):
        return value
    return _BY_PARAMETER, {numbers[id(key)]: part for key, part in value.items()}


def _by_parameter(optimizer: Optimizer, value: Any) -> Any:
    """The dict that `_numbered` has returned something for."""
    if type(value) is not tuple or value[:1] != (_BY_PARAMETER,):
        return value
    parameters = parameters_of(optimizer)
    return {parameters[number]: part for number, part in value[1].items()}


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if depth and type(value) in (list, tuple, collections.deque):
        for part in value:
            yield from _leaves(part, depth - 1)
    elif depth and type(value) is dict:
        for key, part in value.items():
            yield from _leaves(key, depth - 1)
            yield from _leaves(part, depth - 1)
    else:
        yield value


def _is_number_or_text(leaf: Any) -> bool:
    return type(leaf) in _PLAIN and not (len(text := str(leaf)) >= _DIGITS and text.isdigit())


def _text(value: Any) -> str:
    return json.dumps(Packer({}).pack(value, ""))


def unpacked(packed: Any) -> Any:
    """The plain value that `Packer` has packed."""
    nothing: dict[str, Tensor] = {}
    return Unpacker(_CPU).unpack(packed, nothing.pop)
