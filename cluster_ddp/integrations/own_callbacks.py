"""Saves what a program's own callbacks of transformers' Trainer keep in attributes, such as the best value so far."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState

from cluster_ddp.integrations.derived_trainer import can_be_kept, plain, put_into
from cluster_ddp.train.objects.syntax import assigned, is_of_clock
from cluster_ddp.train.own.watch.bodies import tree_of_object

_OTHERS = {"transformers", __name__.partition(".")[0]}


class OwnCallbacks:
    """What training has changed in the attributes of the program's callbacks, as far as it can be saved.

    These are numbers, strings, tensors, and lists and dicts of these. What a callback was made with is not saved, so
    that a resume may change it, and neither is the time at which something began, from which an attempt measures its
    own. A callback with a state of its own, an `ExportableState`, is left to that.

    Parameters
    ----------
    trainer
        The trainer, before its first step.
    restored
        What `state` returned when the checkpoint was saved; empty in a fresh run.
    """

    def __init__(self, trainer: Any, restored: Mapping[str, Mapping[str, Any]]) -> None:
        self._trainer, self._restored = trainer, restored
        self._held = {name: dict(vars(callback)) for name, callback in self._callbacks()}
        self._made = {name: _values(callback, 1) for name, callback in self._callbacks()}
        self._times = {name: _times_in(type(callback)) for name, callback in self._callbacks()}

    def restore(self) -> None:
        """Put back what was saved; call it where it was saved, as callbacks set some of it when training begins."""
        for name, callback in self._callbacks():
            saved = copy.deepcopy(dict(self._restored.get(name, {"values": {}, "things": []})))
            # What is opened late, such as a log, is opened again only if no flag says that it is there.
            lacks = any(vars(callback).get(thing) is None for thing in saved["things"])
            for attribute, value in saved["values"].items():
                if not (lacks and type(value) is bool):
                    setattr(callback, attribute, put_into(vars(callback).get(attribute), value))

    def state(self) -> dict[str, dict[str, Any]]:
        """By callback, the attributes that are no longer as they were made, and the names of those it cannot save."""
        found: dict[str, dict[str, Any]] = {}
        for name, callback in self._callbacks():
            made, held = self._made.get(name, {}), self._held.get(name, {})
            now = _values(callback, self._trainer.args.world_size)
            values = {key: value for key, value in now.items() if key not in made or not _same(made[key], value)}
            found[name] = {
                "values": {key: value for key, value in values.items() if key not in self._times.get(name, ())},
                "things": [
                    key for key, value in vars(callback).items() if key not in now and held.get(key) is not value
                ],
            }
        return found

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        number = Counter[str]()  # of each class: the others may depend on where the run goes on
        for callback in self._trainer.callback_handler.callbacks:
            kind = type(callback)
            if kind.__module__.partition(".")[0] not in _OTHERS and not isinstance(callback, ExportableState):
                number[kind.__name__] += 1
                yield f"{kind.__name__} {number[kind.__name__]}", callback


def _times_in(kind: type) -> set[str]:
    """The attributes that a class sets to a time, such as that of its first step."""
    nodes = (node for base in kind.__mro__ for node in ast.walk(tree_of_object(base)))
    setting = (node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_of_clock(node))
    return {name.removeprefix("self.") for node in setting for name in assigned(node)}


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
