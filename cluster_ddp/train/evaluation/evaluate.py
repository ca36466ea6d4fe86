"""Evaluates on each sample of a data set exactly once, on any number of ranks, without affecting training."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from cluster_ddp.job import BatchPlan, TrainSpec
from cluster_ddp.train.buffers import Buffers
from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import Loader
from cluster_ddp.train.data.order import Indices
from cluster_ddp.train.data.sets import refuse_loader
from cluster_ddp.train.errors import DataError, TaskError
from cluster_ddp.train.objects.contents import contents
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.precision import Precision
from cluster_ddp.train.randomness import OwnGenerators, StepSeeds, Use
from cluster_ddp.train.ranks.communicating import IN_EVALUATE, Alone
from cluster_ddp.train.ranks.distributed import World, all_gather_object, broadcast_object
from cluster_ddp.train.state.modes import Modes
from cluster_ddp.train.state.stateful import are_alike, copied
from cluster_ddp.train.state.training import State
from cluster_ddp.train.task import Task


@dataclass(frozen=True)
class Part:
    """One evaluation batch on one rank: its number and its samples, which may be none at the end."""

    number: int
    indices: Indices


class Evaluation:
    """Averages a task's metrics over a data set.

    The set is cut into batches, which are dealt out to the ranks in turn; no sample is repeated to fill up a batch, so
    each counts once.
    """

    def __init__(
        self,
        task: Task,
        data: Dataset[object],
        train: TrainSpec,
        plan: BatchPlan,
        world: World,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._samples = len(data)  # type: ignore[arg-type]
        if self._samples == 0:
            raise DataError("eval_data() is empty: give at least one sample, or return None for no evaluation")
        self.data, self._task = data, task
        self._fetcher = Fetcher(data, task.collate, Use.EVALUATION, train.seed)
        self._seed, self._every = train.seed, train.evaluate_every
        self._batch_size, self._workers = plan.micro_batch, train.workers
        self._world, self._precision, self._device = world, precision, device

    @classmethod
    def of(
        cls, task: Task, train: TrainSpec, plan: BatchPlan, world: World, precision: Precision, device: torch.device
    ) -> Evaluation | None:
        """The task's evaluation; None if it has no data for one."""
        data = task.eval_data()
        if data is None:
            return None
        refuse_loader(data, "eval_data()")
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            raise DataError(
                "eval_data() returned a set without a length; return a map-style set, or None for no evaluation"
            )
        return cls(task, data, train, plan, world, precision, device)

    def is_due(self, step: int, *, total: int, per_epoch: int | None) -> bool:
        """Whether ``train.evaluate_every`` asks for one after this many steps; there is one after the last in any case.

        Parameters
        ----------
        per_epoch
            Steps per epoch; None if there are no epochs.
        """
        every = (per_epoch or total) if self._every == "epoch" else self._every
        return step >= total or (every != "end" and step % int(every) == 0)

    def run(self, model: nn.Module, go_on: Callable[[int], bool]) -> dict[str, float] | None:
        """Evaluate the model.

        Parameters
        ----------
        go_on
            Called with the number of each batch after it, equally often on every rank; the answer must be the same on
            all.

        Returns
        -------
        Each metric's mean over the set, the same on all ranks; None if `go_on` returned False.
        """
        with in_evaluation_mode(model), torch.no_grad():
            return self._average(model, go_on)

    def _average(self, model: nn.Module, go_on: Callable[[int], bool]) -> dict[str, float] | None:
        sums: dict[str, Tensor] = {}
        around = generators_around([self._task, *model.modules()])
        own = OwnGenerators(self._task, model, around=around)
        seeds = StepSeeds(self._seed, self._world.rank, self._device, own, Use.EVALUATION)
        for part, batch in self._batches():
            if len(part.indices):
                seeds.apply(0, part.number)
                alone = contextlib.nullcontext() if self._have_all_a_batch(part) else Alone(IN_EVALUATE)
                with self._precision.autocast(), alone:
                    values = self._task.evaluate(model, batch)
                _add(sums, values, len(part.indices))
            if not go_on(part.number):
                return None
        return self._over_ranks(sums)

    def _batches(self) -> Iterator[tuple[Part, object]]:
        loader = Loader(
            self._fetcher,
            (part for part in self._parts() if len(part.indices)),
            lambda part: (0, part.indices),
            workers=self._workers,
            device=self._device,
        )
        try:
            yield from loader
            yield from ((part, None) for part in self._parts() if not len(part.indices))
        finally:
            loader.close()

    def _parts(self) -> Iterator[Part]:
        """Yield equally many parts on every rank; only the last may be without samples."""
        for number in range(-(-self._batches_of_all // self._world.world_size)):
            first = (number * self._world.world_size + self._world.rank) * self._batch_size
            yield Part(number, np.arange(first, max(first, min(first + self._batch_size, self._samples))))

    @property
    def _batches_of_all(self) -> int:
        return -(-self._samples // self._batch_size)

    def _have_all_a_batch(self, part: Part) -> bool:
        return (part.number + 1) * self._world.world_size <= self._batches_of_all

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        # A rank without a batch knows no metric names; rank 0 always has the first batch.
        names = broadcast_object(list(sums))
        _check_names(sums, names)
        total = torch.zeros(len(names), dtype=torch.float64)
        for position, name in enumerate(names):
            if name in sums:
                total[position] = sums[name].double().cpu()
        if dist.is_initialized():
            dist.all_reduce(total)
        return dict(zip(names, (total / self._samples).tolist(), strict=True))


def _check_names(names: Collection[str], others: Collection[str]) -> None:
    """Raise a `TaskError` for a metric missing in some batches, whose samples its mean would wrongly include."""
    if names and others and set(names) != set(others):
        raise TaskError(
            f"evaluate() returned the metrics {', '.join(sorted(names))} for one batch and "
            f"{', '.join(sorted(others))} for "
            "another; return the same names for every batch, on all ranks"
        )


def _add(sums: dict[str, Tensor], values: Any, samples: int) -> None:
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise TaskError(f"evaluate() returned type {type(values).__name__}; return a dict of metric names and tensors")
    _check_names(values, sums)
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (samples,) or value.is_complex():
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise TaskError(
                f"evaluate() returned '{name}' with {what} for a batch of {samples} samples; "
                f"give a tensor of one value per sample, shape ({samples},)"
            )
        exact = value.detach().float() if value.device.type == "mps" else value.detach().double()
        total = exact.sum()
        sums[name] = sums[name] + total if name in sums else total


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Call ``eval()``, and afterwards ``train()`` on what was in training mode, since parts may be frozen.

    A layer with its own ``train()`` may change its weights for evaluation and compute them back, as merged LoRA layers
    do: its weights are kept on the host and restored bit by bit.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        (weight, weight.detach().to("cpu", copy=True))
        for module, _ in modes
        if type(module).train is not nn.Module.train
        for weight in module.parameters(recurse=False)
    ]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


def mark_of(state: State, put_back: Collection[str]) -> object:
    """Something that differs once an evaluation has changed what the next step may depend on, other than by mistake.

    Parameters
    ----------
    put_back
        Names of frozen weights that are put back if the evaluation is interrupted; others would not be.
    """
    tensors, scalars = state.collect()
    for name in {*state.from_rank_0()} - {f"model.{name}" for name in put_back}:
        tensors.pop(name, None)
    of_task = [scalars[key] for key in ("task", "extra_state", "modes_of_task")]
    return contents(tensors.items()), json.dumps(of_task, sort_keys=True)


class FrozenWeights:
    """Finds the frozen weights of a model that steps change themselves, such as those of a momentum encoder.

    Make it before any of them has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
        self._first = contents(self._weights.items())

    def changed(self) -> set[str]:
        """The names of those that have changed so far."""
        now = contents(self._weights.items())
        return {name for name, digest in now.items() if digest != self._first.get(name)}


class BeforeEvaluation:
    """The state that an evaluation may change, to be restored if it is interrupted, because it will be repeated.

    Parameters
    ----------
    model
        The model that is trained.
    evaluated
        The model that is evaluated: the same one, or the average. Its weights change if an embedding has ``max_norm``.
        Their copies take up the memory of the gradients, of which there are none at that point.
    frozen
        Tells which frozen weights an evaluation may change as well, because training does.

    Attributes
    ----------
    frozen
        The names of these.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluated: nn.Module,
        buffers: Buffers,
        frozen: FrozenWeights,
        task: Task,
        modes: Modes | None,
    ) -> None:
        self._buffers, self._task, self._modes = buffers, task, modes
        buffers.keep()
        self.frozen = changed = frozen.changed()
        named = [
            *evaluated.named_parameters(),
            *(model.named_parameters() if model is not evaluated and changed else ()),
        ]
        self._weights = [weight.detach() for name, weight in named if weight.requires_grad or name in changed]
        self._kept = [weight.clone() for weight in self._weights]
        self._extra_state = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in model.modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        self._task_state = copied(task.state_dict())
        self._modes_of_task = {} if modes is None else modes.changed()

    def put_back(self) -> None:
        """Restore weights, buffers, modules and task."""
        torch._foreach_copy_(self._weights, self._kept)
        self._buffers.put_back(True)
        for module, state in self._extra_state:
            module.set_extra_state(state)
        # A state that has not changed is not loaded: load_state_dict() might change something else.
        is_same = are_alike(self._task_state, self._task.state_dict())
        if self._task_state and not all(all_gather_object(is_same)):
            self._task.load_state_dict(self._task_state)
        if self._modes is not None:
            self._modes.restore(self._modes_of_task)
            self._modes.restore_late(self._modes_of_task)
