"""`Task`, the class that users derive from, and the import of the task that a job file names."""

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

    `model`, `train_data` and `loss` are required; the rest has defaults. The job file's ``params:`` are passed to
    ``__init__`` as keyword arguments.

    Attributes
    ----------
    weight_decay
        ``train.weight_decay`` of the job file; set by the trainer before `optimizer` is called.
    sharded
        Whether `train_data` returns a separate part of an iterable data set on each rank, rather than the whole stream.
    """

    weight_decay: float = 0.01
    sharded: bool = False

    def model(self) -> nn.Module:
        """Build the model on the CPU. The generators are seeded the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no model()")

    def train_data(self) -> Dataset[Any]:
        """Return the training data set, map-style or iterable (see `cluster_ddp.train.data.iterable`).

        An item is a tensor, or a tuple, list or dict of tensors. torch, random, numpy and the generators that the data
        set itself holds are seeded by (seed, epoch, sample index) before ``__getitem__``, whichever process fetches the
        sample. A data set with ``__getitems__(indices)`` is fetched by batch and seeded by its first index; if it
        returns a list of items, they are collated, and anything else is used as the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no train_data()")

    def eval_data(self) -> Dataset[Any] | None:
        """Return the map-style data set for evaluation; None: no evaluation."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """Compute the loss of a batch.

        Returns
        -------
        A scalar, the mean over the samples of the batch; or a pair (sum, weight) of scalars, if samples have different
        weights, for example their number of tokens: the loss of a step is then the sum over the global batch divided by
        the weight of the global batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss()")

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute the metrics of a batch: for each name, one value per sample, shape (batch,).

        They are averaged exactly over the whole data set and all ranks, and logged as ``val/<name>``. The default
        returns none.
        """
        return {}

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Create the optimizer, with `lr` as its peak learning rate.

        The default is AdamW, fused where torch supports it, with weight decay on weights but not on norms and biases.
        """
        return adamw(model, lr, self.weight_decay)

    def prepare(self) -> None:
        """Download, unpack, stage: once per node, before the data sets are made."""

    def collate(self, items: list[Any]) -> Any:
        """Combine items into a batch; the default is torch's default_collate."""
        return default_collate(items)

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state, which checkpoints contain: tensors or JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def expect_type(value: Any, kind: type[T], by: str) -> T:
    """Return the result of a task's method; raise a `TaskError` if it is not of the expected kind."""
    if not isinstance(value, kind):
        raise TaskError(f"{by} returned type {type(value).__name__}; return {kind.__name__}")
    return value


def load_task(target: str, params: Mapping[str, Any]) -> Task:
    """Create the task that a job file names; see `find_task`. Errors inside ``__init__`` are raised unchanged."""
    kind = find_task(target)
    expect_params(kind, params)
    return kind(**params)


def expect_params(kind: type[Task], params: Mapping[str, Any]) -> None:
    """Raise a `TaskError` if a task does not accept these parameters, or requires one that is missing."""
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
        There is no such class, or it does not derive from Task. Errors inside the module itself are raised unchanged.
    """
    place, _, name = target.rpartition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_of_name(place)
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Task):
        what = "does not exist" if kind is None else "does not derive from cluster_ddp.train.Task"
        raise TaskError(f"task: {name} in {place} {what}")
    return kind


def _module_of_name(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a json.py in this folder must not replace the json that torch imports
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, but something that it imports does not
        raise TaskError(
            f"task: there is no module {name} on this node ({sys.executable}, python path: {sys.path})"
        ) from error


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(f"task: there is no file {path} on this node")
    sys.path.insert(0, str(path.parent))  # as when the file is run, so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # DataLoader workers that are spawned look it up by name
    spec.loader.exec_module(module)
    return module
