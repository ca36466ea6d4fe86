"""Finds the variables of the classes and modules of the user's code, which are attributes of no object."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from cluster_ddp.train.objects.inner_parts import PLAIN, can_be_seen
from cluster_ddp.train.objects.whose_code import is_of_user
from cluster_ddp.train.randomness import GENERATORS, parts_of

_DEPTH = 5  # how deep variables are searched for generators


def variables_around(objects: Iterable[object]) -> dict[str, Any]:
    """The variables, by name, of the modules of the objects' classes and of the user's modules that these import.

    Skips installed packages and modules themselves; of functions and classes, it returns what they keep.
    """
    kinds = dict.fromkeys(kind for thing in objects for kind in (_itself(thing) or type(thing).__mro__))
    classes = {kind: None for kind in kinds if isinstance(kind, type) and is_of_user(kind.__module__)}
    found: dict[str, Any] = {}
    for module in _reachable({_module_of(kind): None for kind in kinds}):
        for key, value in list(vars(module).items()):
            if not can_be_seen(value):
                continue
            if isinstance(value, (type, FunctionType)) and value.__module__ != module.__name__:
                continue  # it is found where it was defined, if that is the user's code
            if isinstance(value, type):
                classes[value] = None
            elif _is_variable(key, value):
                found[f"{module.__name__}.{key}"] = value
    for kind in _with_inner(classes):
        parts = ((key, getattr(part, "__func__", part)) for key, part in list(vars(kind).items()))
        found |= {f"{kind.__name__}.{key}": part for key, part in parts if _is_variable(key, part)}
    return found


def _with_inner(classes: dict[type, None]) -> Iterator[type]:
    """The classes, and those that are defined inside them, such as for settings."""
    for kind in classes:
        if isinstance(kind, enum.EnumMeta):
            continue  # its members are found where they are used
        yield kind
        inner = [part for part in list(vars(kind).values()) if isinstance(part, type)]
        yield from _with_inner({part: None for part in inner if part.__qualname__.startswith(f"{kind.__qualname__}.")})


def settings_of_torch() -> dict[str, Any]:
    """What holds for all of torch, and may make a step compute something else."""
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
    }


def modules_around(objects: Iterable[object]) -> Iterator[ModuleType]:
    """The user's modules that define the objects' classes, and those of the user's that these import."""
    return _reachable({str(kind.__module__): None for thing in objects for kind in type(thing).__mro__})


def generators_around(objects: Iterable[object]) -> dict[str, Any]:
    """The random generators in `variables_around`, each once, also inside values: scripts often have one at the top."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, value in sorted(variables_around(objects).items()):
        held = [part for part in parts_of(value, depth=_DEPTH) if isinstance(part, GENERATORS) and id(part) not in seen]
        seen.update(map(id, held))
        found |= {f"{name}.{number}" if number else name: part for number, part in enumerate(held)}
    return found


def _itself(value: object) -> tuple[Any, ...]:
    if isinstance(value, type):
        return value.__mro__
    return (value,) if isinstance(value, (FunctionType, ModuleType)) else ()


def _module_of(kind: object) -> str:
    return kind.__name__ if isinstance(kind, ModuleType) else str(kind.__module__)


def _reachable(names: dict[str, None]) -> Iterator[ModuleType]:
    """The user's modules among these names, and those that they import or import from."""
    done: set[str] = set()
    while names:
        name, _ = names.popitem()
        if name in done or not is_of_user(name):
            continue
        done.add(name)
        yield (module := sys.modules[name])
        for value in filter(can_be_seen, list(vars(module).values())):
            with contextlib.suppress(Exception):  # what answers for something else may fail to
                # An object has that of its class, and a method that of its function.
                names[str(value.__name__ if isinstance(value, ModuleType) else value.__module__)] = None


def _is_variable(name: str, value: Any) -> bool:
    if name.startswith("__") or isinstance(value, (ModuleType, type)):
        return False
    if isinstance(value, FunctionType):  # most have nothing to compare
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return bool(value.__closure__ or vars(value)) or not all(type(part) in PLAIN for part in given)
    return not hasattr(type(value), "__get__") or is_of_user(type(value).__module__)
