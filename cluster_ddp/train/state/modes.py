"""What modules besides the model, such as a teacher, are set to: training or evaluation mode, frozen or trained."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from cluster_ddp.train.objects.held import are_hooks
from cluster_ddp.train.objects.inner_parts import CONTAINERS, HOLDERS, can_be_seen, elements, inner_parts
from cluster_ddp.train.objects.kinds import is_of_library
from cluster_ddp.train.objects.surroundings import variables_around

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DEPTH, _WIDTH = 10, 100  # how deep in the task modules are looked for, and in how many parts of each thing


class Modes:
    """Remembers how a task's own modules, such as a teacher, were set at first, and restores what training changes.

    Of modules that the task has only later, such as a copy of the model after a few epochs, it restores everything.

    Parameters
    ----------
    task
        Its modules are those that it and the variables around it hold, in attributes, lists, dicts, functions and
        objects of the user's.
    known
        Ids of modules whose modes are saved elsewhere.
    besides
        What else holds some now, by name, such as what the model holds without registering it.
    """

    def __init__(self, task: object, known: Collection[int], besides: Mapping[str, Any] = _NOTHING) -> None:
        self._task, self._known = task, known
        self._modules = self._find(besides)
        self._first = _flags_of(self._modules)

    def changed(self) -> dict[str, bool]:
        """What is set otherwise than at first, and all of what the task did not have then."""
        now = _flags_of(self._modules) | _flags_of(self._late())
        return {name: flag for name, flag in now.items() if flag != self._first.get(name)}

    def restore(self, changed: Mapping[str, bool]) -> None:
        """Set what `changed` returned, and the rest as at first: a step before the restore may have changed it."""
        _set(self._modules, self._first | dict(changed))

    def restore_late(self, changed: Mapping[str, bool]) -> None:
        """Call when the task has loaded its state, which may have made modules, in training mode or not."""
        _set(self._late(), self._first | dict(changed))

    def _find(self, besides: Mapping[str, Any] = _NOTHING) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        seen = {id(self._task)}
        others = {**variables_around([self._task]), **besides}
        around = (_modules_in(*other, _DEPTH, seen) for other in others.items())
        for name, whole in itertools.chain(_modules_in("task", self._task, _DEPTH, seen), *around):
            inner = {f"{name}.{path}".rstrip("."): module for path, module in whole.named_modules()}
            found |= {path: module for path, module in inner.items() if id(module) not in self._known}
        return found

    def _late(self) -> dict[str, nn.Module]:
        first = set(map(id, self._modules.values()))
        return {name: module for name, module in self._find().items() if id(module) not in first}


def _flags_of(modules: Mapping[str, nn.Module]) -> dict[str, bool]:
    flags = {name: module.training for name, module in modules.items()}
    for name, module in modules.items():
        held = module._parameters.items()
        flags |= {f"{name}, {key}": weight.requires_grad for key, weight in held if weight is not None}
    return flags


def _set(modules: Mapping[str, nn.Module], flags: Mapping[str, bool]) -> None:
    for name, module in modules.items():
        module.training = flags.get(name, module.training)
        for key, parameter in module._parameters.items():
            if parameter is not None and (flag := flags.get(f"{name}, {key}")) is not None:
                parameter.requires_grad_(flag)


def _modules_in(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    level = [(name, value)]
    for _ in range(depth + 1):  # level by level, so that each is found by its shortest way
        inner: list[tuple[str, Any]] = []
        for where, part in level:
            if issubclass(type(part), nn.Module):
                yield where, part
                continue
            with contextlib.suppress(Exception):  # it may have no attributes, although it has a class
                for key, held in islice(_parts(part), _WIDTH):
                    if can_be_seen(held) and id(held) not in seen:
                        seen.add(id(held))
                        inner.append((f"{where}.{key}", held))
        level = inner


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if are_hooks(value):
        return enumerate(elements(value))
    if issubclass(type(value), dict):
        return list(dict.items(value))
    if issubclass(type(value), CONTAINERS):
        return enumerate(elements(value))
    is_searched = issubclass(type(value), (*HOLDERS, Dataset)) or not is_of_library(value)
    return inner_parts(value) if is_searched else ()
