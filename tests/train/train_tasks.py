"""Small tasks for the tests of the trainer, and the means to run and compare trainings of them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from cluster_ddp.job import JobSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.stopfile import SAVE_AND_END
from cluster_ddp.train import Outcome, StopSignals, Task, Trainer, reduce_tensor
from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import Loader
from cluster_ddp.train.ranks.process import RankProcess

JobSpec.model_rebuild()  # now, and not in each of the many processes that are forked from this one
CPU = torch.device("cpu")
SAMPLES = 50
FEATURES = 12
CLASSES = 3


def samples(number: int = SAMPLES, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs of shape (number, 12) and labels of shape (number,)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, FEATURES, generator=generator)
    return inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A set with random augmentation that draws from all three generators."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(FEATURES) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.inputs[index] + noise, self.labels[index]


class Plain(Task):
    """A net without BatchNorm and dropout on data without noise."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*samples())

    def eval_data(self) -> Dataset[Any] | None:
        return TensorDataset(*samples(23, seed=6))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, labels = batch
        scores = model(inputs)
        return {
            "accuracy": (scores.argmax(1) == labels).float(),
            "loss": F.cross_entropy(scores, labels, reduction="none"),
        }


class Exploding(Plain):
    """Its loss is infinite in the steps named."""

    def __init__(self, *steps: int, rank: int = 0) -> None:
        self.calls, self.steps, self.rank = 0, steps, rank

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        loss = super().loss(model, batch)
        bad = self.calls - 1 in self.steps and int(os.environ.get("RANK", 0)) == self.rank
        return loss * float("inf") if bad else loss


class Everything(Plain):
    """All that makes resuming hard: BatchNorm, dropout, random augmentation, random numbers in the loss, own state."""

    def __init__(self) -> None:
        self.seen = 0
        self.mean = torch.zeros(FEATURES)

    def model(self) -> nn.Module:
        # Wide enough for several buckets of DDP when they are small.
        return nn.Sequential(
            nn.Linear(FEATURES, 160), nn.BatchNorm1d(160), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(160, 160), nn.BatchNorm1d(160), nn.ReLU(), nn.Linear(160, CLASSES),
        )  # fmt: skip

    def train_data(self) -> Dataset[Any]:
        return Noisy()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        self.seen += 1
        self.mean += reduce_tensor(inputs.mean(0))  # the same on all ranks, as the state of a task has to be
        weight = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return F.cross_entropy(model(inputs + 0.01 * torch.randn_like(inputs)), labels) * weight

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.mean = state["seen"], state["mean"].clone()


class StopAt(StopSignals):
    """Wants to stop from a given step on."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Trainer | None = None
        self.step = 0

    @property
    def level(self) -> int:
        return SAVE_AND_END if self.trainer is not None and self.trainer.step >= self.step else 0

    @property
    def reason(self) -> str | None:
        return "time-limit" if self.level else None


def new_run(folder: Path, **sections: Any) -> RunDirectory:
    """A run directory of a job with these sections."""
    return create_run(job(**sections), runs_dir=folder, via="local", script=None)


def job(**sections: Any) -> JobSpec:
    """A job; `sections` are those of the job file."""
    return JobSpec.model_validate({"name": "test", "task": "train_tasks:Plain", **sections})


def attentive(stop: StopSignals) -> RankProcess:
    """A process whose ranks exchange whether to stop in every step."""
    return RankProcess(stop=stop, consensus_seconds=0.0)


def train(
    task: Task, spec: JobSpec, run: RunDirectory | None = None, attempt: int = 0, *, stop_at: int | None = None
) -> tuple[Trainer, Outcome]:
    """Train in this process as one of its ranks; with `stop_at` a stop is wanted then, by the last rank alone."""
    wish = StopAt()
    trainer = Trainer(spec, task, run, attempt, process=attentive(wish))
    if stop_at is not None and trainer.world.rank == trainer.world.world_size - 1:
        wish.trainer, wish.step = trainer, stop_at
    return trainer, trainer.run()


def final_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that has to be equal at the end, as rank 0 has it."""
    return {name: tensor.detach().clone() for name, tensor in trainer.state.collect()[0].items()}


def losses(run: RunDirectory) -> list[tuple[int, float]]:
    """The logged losses by step; the highest attempt wins."""
    rows = parse_lines(run.metrics_file.read_bytes())
    return sorted({row["step"]: row["train/loss"] for row in rows if "train/loss" in row}.items())


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def fetch(data: Dataset[Any], *batches: tuple[int, list[int]], workers: int = 0) -> list[Any]:
    """The batches of these epochs and samples."""
    plans = [(epoch, np.array(indices)) for epoch, indices in batches]
    loader = Loader(
        Fetcher(data, default_collate, 1), plans, lambda plan: plan, workers=workers, device=torch.device("cpu")
    )
    try:
        return [batch for _, batch in loader]
    finally:
        loader.close()


def numbered(value: Tensor, numbers: dict[float, int]) -> Tensor:
    """Number values in the order of their appearance."""
    return torch.full((12,), float(numbers.setdefault(float(value), len(numbers))))
