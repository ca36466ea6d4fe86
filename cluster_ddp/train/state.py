"""The state of a training as named tensors and numbers: what a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.ema import Ema
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.task import given
from cluster_ddp.train.update import Update


class Stateful(Protocol):
    """Something with a state of its own, such as a task."""

    def state_dict(self) -> Mapping[str, Any]:
        """Give the state: tensors, or what JSON can hold."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take back what `state_dict` gave."""


@dataclass
class Counts:
    """The numbers that say where training is, besides the step.

    Attributes
    ----------
    skipped, bad_in_a_row
        Updates left out, in all and since the last one that was made.
    evaluated_step
        The last step whose evaluation was finished.
    stream_epoch, stream_offset
        For iterable sets: the epoch, and the items of it that have been taken.
    """

    skipped: int = 0
    bad_in_a_row: int = 0
    evaluated_step: int = -1
    stream_epoch: int = 0
    stream_offset: int = 0


class State:
    """Collects the state for a save, and puts back what was restored.

    Parameters
    ----------
    model
        The bare model.
    update
        Holds the optimizer and the scaler.
    task
        What else has state.
    """

    def __init__(self, model: nn.Module, update: Update, ema: Ema | None, task: Stateful) -> None:
        self.counts = Counts()
        self._model = model
        self._update = update
        self._ema = ema
        self._task = task
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in update.optimizer.param_groups:
            if not all(id(parameter) in self._names for parameter in group["params"]):
                raise TaskError("optimizer() holds a parameter that is not one of model(): make it a part of the model")
        self._first_groups = _plain_settings(update.optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, sharing the memory of the live ones.

        Raises
        ------
        TaskError
            The model's state holds something that is no tensor.
        """
        named: dict[str, Tensor] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise TaskError(
                    f"the model's state '{name}' is a {type(value).__name__}: a checkpoint holds tensors; keep it as a "
                    "buffer, or in state_dict() of the task"
                )
            named[f"model.{name}"] = value
        for parameter, state in self._update.optimizer.state.items():
            fqn = self._names[id(parameter)]
            named.update({f"optimizer.{fqn}.{key}": value for key, value in state.items() if isinstance(value, Tensor)})
        if self._ema is not None:
            named.update({f"ema.{name}": value for name, value in self._ema.tensors().items()})
        named.update({f"task.{name}": value for name, value in self._task_state().items() if isinstance(value, Tensor)})
        return named

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, for JSON."""
        self.counts.skipped, self.counts.bad_in_a_row = self._update.left_out()
        scaler = self._update.scaler
        return {
            "counts": asdict(self.counts),
            "scaler": None if scaler is None else scaler.state_dict(),
            "optimizer_state": self._plain_optimizer_state(),
            "optimizer_groups": self._changed_settings(),
            "task": {name: value for name, value in self._task_state().items() if not isinstance(value, Tensor)},
        }

    def load(self, step: int, scalars: Mapping[str, Any], optimizer: Mapping[str, Tensor]) -> None:
        """Put back what `Checkpointer.restore` has not filled in place.

        Parameters
        ----------
        step
            Steps that are finished.
        scalars
            What `scalars` gave.
        optimizer
            The optimizer's tensors by their names.
        """
        self.counts = Counts(**scalars["counts"])
        self._update.restore(self.counts.skipped, self.counts.bad_in_a_row)
        self._load_optimizer(optimizer, scalars["optimizer_state"], scalars["optimizer_groups"])
        if self._update.scaler is not None and scalars["scaler"]:
            # Where the scale stands is state; how it moves is the job file's.
            kept = {key: scalars["scaler"][key] for key in ("scale", "_growth_tracker")}
            self._update.scaler.load_state_dict({**self._update.scaler.state_dict(), **kept})
        if self._ema is not None:
            self._ema.restore(step)
        task_state = {**scalars["task"], **self._task_tensors}
        if task_state:
            self._task.load_state_dict(task_state)

    def live(self) -> dict[str, Tensor]:
        """The tensors to fill at a restore: all that exist before the first step."""
        self._task_tensors = {name: value for name, value in self._task_state().items() if isinstance(value, Tensor)}
        named = {name: tensor for name, tensor in self.tensors().items() if not name.startswith("task.")}
        return named | {f"task.{name}": value for name, value in self._task_tensors.items()}

    def _task_state(self) -> Mapping[str, Any]:
        return given(self._task.state_dict(), dict, "state_dict() of the task")

    def _plain_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps per parameter besides tensors, such as a count of its own."""
        kept = {}
        for parameter, state in self._update.optimizer.state.items():
            plain = {key: value for key, value in state.items() if _is_plain(value)}
            if plain:
                kept[self._names[id(parameter)]] = plain
        return kept

    def _changed_settings(self) -> list[dict[str, Any]]:
        """The settings of each group that the optimizer has changed by itself; the rest is the job file's to say."""
        return [
            {key: value for key, value in now.items() if value != before.get(key)}
            for now, before in zip(_plain_settings(self._update.optimizer), self._first_groups, strict=True)
        ]

    def _load_optimizer(
        self, tensors: Mapping[str, Tensor], plain: Mapping[str, dict[str, Any]], settings: list[dict[str, Any]]
    ) -> None:
        by_name: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain.items()}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            by_name.setdefault(name, {})[key] = tensor
        optimizer = self._update.optimizer
        whole = optimizer.state_dict()
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = [self._names[id(parameter)] for parameter in order]
        whole["state"] = {number: by_name[name] for number, name in enumerate(names) if name in by_name}
        for group, changed in zip(whole["param_groups"], settings, strict=False):
            group.update(changed)
        optimizer.load_state_dict(whole)


def _plain_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Per group, what JSON can hold; not the learning rate, which follows from the step."""
    left_out = ("params", "lr")
    plain = [
        {key: value for key, value in group.items() if key not in left_out and _is_plain(value)}
        for group in optimizer.param_groups
    ]
    settings: list[dict[str, Any]] = json.loads(json.dumps(plain))
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, torch.dtype))
