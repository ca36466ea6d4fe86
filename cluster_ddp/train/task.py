"""What the user writes: a task."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.optimizer import adamw

T = TypeVar("T")


class Task:
    """One training problem. Derive from it and name the class in the job file (``task: package.module:Class``).

    `model`, `train_data` and `loss` are needed; the rest has defaults. The job file's ``params:`` are handed to
    ``__init__`` as keyword arguments.

    Attributes
    ----------
    weight_decay
        ``train.weight_decay`` of the job file; set by the trainer before `optimizer` is called.
    sharded
        Whether `train_data` gives each rank a part of its own of an iterable set; else all give the whole stream.
    """

    weight_decay: float = 0.01
    sharded: bool = False

    def model(self) -> nn.Module:
        """Build the model, on the CPU. The generators are seeded the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no model()")

    def train_data(self) -> Dataset[Any]:
        """Give the data set to train on; map-style, or iterable as `cluster_ddp.train.data.iterable` describes.

        An item is a tensor, or a tuple, list or dict of tensors. torch, random, numpy and the generators that the set
        holds itself are seeded by (seed, epoch, sample index) before ``__getitem__``, whichever process fetches the
        sample. A set with ``__getitems__(indices)`` is fetched by batch and seeded by its first index; what it gives is
        collated when it is a list of items, and is the batch itself when it is anything else.
        """
        raise NotImplementedError(f"{type(self).__name__} has no train_data()")

    def eval_data(self) -> Dataset[Any] | None:
        """Give the map-style data set to evaluate on; None: there is no evaluation."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """Compute the loss of a batch.

        Returns
        -------
        A scalar, the mean over the samples of the batch; or a pair (sum, weight) of scalars, when samples count
        differently, such as by their tokens: the loss of a step is then the sum over the global batch divided by the
        weight of the global batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss()")

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute the metrics of a batch: for each name one value per sample, shape (batch,).

        They are averaged exactly over the whole set and all ranks, and logged as ``val/<name>``. The default gives
        nothing.
        """
        return {}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Make the optimizer, with `lr` as its peak learning rate.

        The default is AdamW, fused where torch has it, with weight decay on weights but not on norms and biases.
        """
        return adamw(model, lr, self.weight_decay)

    def prepare(self) -> None:
        """Download, unpack, stage: once per node, before the data sets are made."""

    def collate(self, items: list[Any]) -> Any:
        """Make a batch of items; the default is torch's default_collate."""
        return default_collate(items)

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the task itself that a checkpoint has to hold: tensors, or what JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def expect_type(value: Any, kind: type[T], by: str) -> T:
    """What a method of a task gave; a `TaskError` when it is not of the kind that it should be."""
    if not isinstance(value, kind):
        raise TaskError(f"{by} gave a {type(value).__name__}; give a {kind.__name__}")
    return value


def load_task(target: str, params: Mapping[str, Any]) -> Task:
    """Make the task that a job file names; see `find_task`. An error inside ``__init__`` is raised as it is."""
    kind = find_task(target)
    expect_params(kind, params)
    return kind(**params)


def expect_params(kind: type[Task], params: Mapping[str, Any]) -> None:
    """Raise a `TaskError` when a task has no such parameters, or lacks one that it must have."""
    try:
        inspect.signature(kind).bind(**params)
    except TypeError as error:
        raise TaskError(f"task: {kind.__name__} does not take these params: {error}") from error


def find_task(target: str) -> type[Task]:
    """Import the class that a job file names.

    Parameters
    ----------
    target
        ``package.module:Class`` or ``path/to/file.py:Class``.

    Raises
    ------
    TaskError
        There is no such class, or it is no Task. An error inside the module itself is raised as it is.
    """
    place, _, name = target.rpartition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_of_name(place)
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Task):
        what = "does not exist" if kind is None else "does not derive from cluster_ddp.train.Task"
        raise TaskError(f"task: {target}: {name} {what}")
    return kind


def _module_of_name(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a json.py of this folder is not what torch means by json
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module is there; something that it imports is not
        raise TaskError(f"task: there is no module {name} on this node (python path: {sys.path})") from error


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(f"task: there is no file {path} on this node")
    sys.path.insert(0, str(path.parent))  # as when the file is run: its neighbours can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # DataLoader workers that are spawned look it up by name
    spec.loader.exec_module(module)
    return module
