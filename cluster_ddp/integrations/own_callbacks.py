"""Saves what a program's own callbacks of transformers' Trainer keep in attributes, such as the best value so far."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState

from cluster_ddp.integrations.derived_trainer import can_be_kept, plain, put_into

_OTHERS = {"transformers", __name__.partition(".")[0]}


class OwnCallbacks:
    """What training has changed in the attributes of the program's callbacks, as far as it can be saved.

    These are numbers, strings, tensors, and lists and dicts of these. What a callback was made with is not saved, so
    that a resume may change it. A callback with a state of its own, an `ExportableState`, is left to that.

    Parameters
    ----------
    trainer
        The trainer, before its first step.
    restored
        What `state` returned when the checkpoint was saved; empty in a fresh run.
    """

    def __init__(self, trainer: Any, restored: Mapping[str, Mapping[str, Any]]) -> None:
        self._trainer, self._restored = trainer, restored
        self._made = {name: _values(callback, 1) for name, callback in self._callbacks()}

    def restore(self) -> None:
        """Put back what was saved; call it where it was saved, as callbacks reset some of it when training begins."""
        for name, callback in self._callbacks():
            for attribute, value in copy.deepcopy(dict(self._restored.get(name, {}))).items():
                setattr(callback, attribute, put_into(vars(callback).get(attribute), value))

    def state(self) -> dict[str, dict[str, Any]]:
        """The attributes that are no longer as they were made, by callback."""
        found: dict[str, dict[str, Any]] = {}
        for name, callback in self._callbacks():
            made = self._made.get(name, {})
            now = _values(callback, self._trainer.args.world_size)
            found[name] = {key: value for key, value in now.items() if key not in made or not _same(made[key], value)}
        return found

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        for number, callback in enumerate(self._trainer.callback_handler.callbacks):
            kind = type(callback)
            if kind.__module__.partition(".")[0] not in _OTHERS and not isinstance(callback, ExportableState):
                yield f"{number} {kind.__name__}", callback


def _values(callback: Any, ranks: int) -> dict[str, Any]:
    held = {name: value for name, value in vars(callback).items() if can_be_kept(value, ranks)}
    return {name: copy.deepcopy(plain(value)) for name, value in held.items()}


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)  # NaN
