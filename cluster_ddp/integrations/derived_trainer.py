"""Saves what a class derived from transformers' Trainer keeps in its own attributes, as TRL's trainers do."""

from __future__ import annotations

import collections
import dis
import functools
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from cluster_ddp.train.objects.attributes import Attributes

_LOOKED_AT = 2  # steps in which changes are looked for
_SIMPLE = (bool, int, float, str, type(None))
_LISTS = (list, tuple, collections.deque)
_DICTS = (dict, collections.defaultdict)


class DerivedTrainer:
    """Finds, in the first two steps of an attempt, the attributes that steps change, and saves those it can.

    It can save numbers, strings, tensors, and lists and dicts of these.

    Parameters
    ----------
    trainer
        The trainer, before its first step.
    restored
        What `state` returned when the checkpoint was saved; empty in a fresh run.
    """

    def __init__(self, trainer: Any, restored: Mapping[str, Any]) -> None:
        self._trainer, self._names = trainer, set(restored)
        for name, value in restored.items():
            setattr(trainer, name, put_into(vars(trainer).get(name), value))
        self._before = Attributes(_own_attributes(trainer))
        self._steps = 0

    def end_step(self) -> set[str]:
        """Call after each step, before a save; after the second, returns the names of changed attributes not saved."""
        self._steps += 1
        if self._steps > _LOOKED_AT:
            return set()
        held = _own_attributes(self._trainer)
        before, self._before = self._before, Attributes(held)
        changed = {before.holders.get(leaf) or self._before.holders[leaf] for leaf in before.changed(self._before)}
        self._names |= {name for name in changed if name in held and self._is_kept(held[name])}
        return changed - self._names if self._steps == _LOOKED_AT else set()

    def state(self) -> dict[str, Any]:
        """The current values of the saved attributes."""
        held = vars(self._trainer)
        return {name: plain(held[name]) for name in sorted(self._names) if name in held and self._is_kept(held[name])}

    def _is_kept(self, value: Any) -> bool:
        return can_be_kept(value, self._trainer.args.world_size)


def can_be_kept(value: Any, ranks: int) -> bool:
    """Whether a value is a number, string or tensor, or a list or dict of these."""
    if type(value) in _DICTS:
        return all(type(key) is str and can_be_kept(part, ranks) for key, part in value.items())
    if type(value) is Tensor:  # a save gathers it from all ranks, and would put it on every GPU
        return value.device.type == "cpu" or ranks == 1
    return type(value) in _SIMPLE or (type(value) in _LISTS and all(can_be_kept(part, ranks) for part in value))


def _own_attributes(trainer: Any) -> dict[str, Any]:
    """Attributes set by neither Trainer itself nor `ResumeExactly`, and no modules, which are watched elsewhere."""
    of_trainer = _set_by_trainer()
    return {
        name: value
        for name, value in vars(trainer).items()
        if name not in of_trainer
        and not isinstance(value, nn.Module)  # such as the loss of sentence-transformers, which contains the model
        and not (callable(value) and hasattr(Trainer, name))
    }


@functools.cache
def _set_by_trainer() -> frozenset[str]:
    methods = [method for kind in Trainer.__mro__ for method in vars(kind).values() if isinstance(method, FunctionType)]
    code = [at for method in methods for at in dis.get_instructions(method)]
    return frozenset(at.argval for at in code if at.opname == "STORE_ATTR")


def plain(value: Any) -> Any:
    """The value, with its containers copied to plain dicts, lists and tuples."""
    if type(value) in _DICTS:
        return {key: plain(part) for key, part in value.items()}
    if type(value) in _LISTS:
        parts = map(plain, value)
        return tuple(parts) if type(value) is tuple else list(parts)
    return value


def put_into(into: Any, value: Any) -> Any:
    """Undo `plain`: fill the trainer's own containers in place where there are any."""
    if type(into) in _DICTS and isinstance(value, dict):
        makes = getattr(into, "default_factory", None) or (lambda: None)
        found = {key: put_into(into[key] if key in into else makes(), part) for key, part in value.items()}
        into.clear()
        into.update(found)
        return into
    if type(into) is collections.deque and isinstance(value, list):
        into.clear()
        into.extend(value)
        return into
    return value
