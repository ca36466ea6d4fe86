"""What training changes and no checkpoint holds is told by name or refused; what is kept comes back untold."""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from zoo_awkward import COUNTED
from zoo_models import CLASSES, FEATURES
from zoo_optimizers import OPTIMIZERS
from zoo_training import Case, Crash, ZooTask, job_of, judge

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe
from cluster_ddp.train import Trainer


class CountsLabels(ZooTask):
    """Its state has numbers as keys, and a tuple."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.counts: dict[int, tuple[int, ...]] = {}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.counts[len(self.counts)] = (1, 2)
        return super().loss(model, batch) * len(self.counts)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: Any) -> None:
        self.counts = dict(state["counts"])
        assert all(isinstance(key, int) for key in self.counts)


class Forgets(CountsLabels):
    """Does not take its state back."""

    def load_state_dict(self, state: Any) -> None:
        pass


class ForgetsTensor(ZooTask):
    """Does not take a tensor back, of which each step makes a new one."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.mean = torch.zeros(CLASSES)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.mean = self.mean * 0.9 + 0.1
        return super().loss(model, batch) * self.mean.sum()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}


class Counts(ZooTask):
    """Its loss depends on a count, on a tensor and on a scheduler that no checkpoint contains."""

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        made = super().optimizer(model, lr)
        self.scheduler = OneCycleLR(made, max_lr=0.1, total_steps=100)  # which has optimizer.step in its hands
        return made

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        loss = super().loss(model, batch) * self.calls
        self.before = loss.detach()
        self.scheduler.step()
        return loss


class Keeps(Counts):
    """The same, but it gives it to the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "calls": getattr(self, "calls", 0),
            "before": getattr(self, "before", None),
            "scheduler": {key: value for key, value in self.scheduler.state_dict().items() if key[0] != "_"},
        }

    def load_state_dict(self, state: Any) -> None:
        self.calls, self.before = state["calls"], state["before"]
        self.scheduler.load_state_dict(state["scheduler"])


def test_what_no_checkpoint_holds_is_told_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(Case(), tmp_path, Counts)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert "training changes task.before, task.calls, task.losses, task.scheduler, which" in told[0]
    for record in tmp_path.rglob("run.json"):
        warnings = describe(RunDirectory(record.parent), {}).warnings
        assert any("training changes task.before" in warning for warning in warnings)


class Log(list[float]):
    """A list with more to it."""

    total = 0.0


class CountsElsewhere(ZooTask):
    """Its loss depends on numbers in objects of Python's library, in a list of its own kind, and in a data set."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.options = argparse.Namespace(model=SimpleNamespace(scale=1.0))
        self.waiting: queue.Queue[float] = queue.Queue()
        self.log = Log()
        self.data = TensorDataset(torch.zeros(3))
        self.data.scale, self.data.parts = 1.0, []  # type: ignore[attr-defined]
        self.data.parts.append(self.data.parts)  # type: ignore[attr-defined]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.waiting.put(1.0)
        self.log.total += 1.0
        scale = self.waiting.qsize() + self.log.total
        for holder in (self.options.model, self.data):
            holder.scale += 1.0
            scale += holder.scale
        return super().loss(model, batch) * scale


def test_numbers_in_whatever_holds_them_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(Case(), tmp_path, CountsElsewhere)
    told = next(line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line)
    names = ("data", "log", "options", "waiting")
    assert [name for name in names if f"task.{name}" not in told] == [], told


class CountsLate(ZooTask):
    """Begins to count in its fifth step, and then crashes as soon as that has been told."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None and self.trainer.directory is not None
        if self.trainer.step >= 4:
            self.late = self.trainer.step
            if any("task.late" in warning for warning in describe(self.trainer.directory, {}).warnings):
                raise Crash
            time.sleep(0.01)
        return super().loss(model, batch)


def test_what_begins_to_change_late_is_told_while_training_goes_on(tmp_path: Path) -> None:
    task = CountsLate(Case(train={"steps": 10_000}))
    job = job_of(task.case)
    task.trainer = Trainer(job, task, create_run(job, runs_dir=tmp_path, via="local", script=None))
    with pytest.raises(Crash):
        task.trainer.run()


class MapsFile(ZooTask):
    """Holds its tokens as a file that is mapped into memory and larger than that."""

    def __init__(self, file: Path, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.tokens = np.memmap(file, mode="r")


def test_a_file_that_is_mapped_into_memory_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch()
    os.truncate(file, 1 << 42)
    assert str(judge(Case(), tmp_path, partial(MapsFile, file))) == "exact"


class ReplacesLayer(ZooTask):
    """Gives the model another activation in its second step."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None and isinstance(model, nn.Sequential)
        if self.trainer.step == 1:
            model[1] = nn.Tanh()
        return super().loss(model, batch)


def test_a_layer_that_training_replaces_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(Case(train={"steps": 3, "ema_decay": None}), tmp_path, ReplacesLayer)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert "training changes task.losses, the model's layers, which" in told[0]


class NotInstalled:
    """As what optional_import of monai gives for a module that is missing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


counts = {"calls": 0}
generator = torch.Generator()
missing = NotInstalled()


class CountsForAll(SGD):
    """Counts its steps in a variable of its class."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        CountsForAll.calls += 1
        return super().step(closure)


class OfVariables(ZooTask):
    """Counts its calls in a variable of this module and in one of its class."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        counts["calls"] += 1
        OfVariables.calls += 1
        return super().loss(model, batch) * counts["calls"] * OfVariables.calls


def test_variables_of_modules_and_classes_that_training_changes_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "AdamW", lambda model, lr: CountsForAll(model.parameters(), lr))
    judge(Case(train={"steps": 3, "ema_decay": None}), tmp_path, OfVariables)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert "changes CountsForAll.calls, OfVariables.calls, task.losses, test_zoo_told.counts, which" in told[0]


rows = TensorDataset(torch.ones(4, FEATURES))


class KeepsAnIterator(ZooTask):
    """Keeps what goes through a variable of this module, in an attribute that is looked at before that variable."""

    rows: Any = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.rows = iter(DataLoader(rows))
        return super().loss(model, batch) * next(self.rows)[0].mean()


def test_a_variable_that_something_else_holds_now_is_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(Case(train={"steps": 3}), tmp_path, KeepsAnIterator)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert "training changes task.losses, task.rows, which" in told[0]


class DrawsHere(ZooTask):
    """Draws from a generator at the top of this module, also for each batch."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * torch.rand((), generator=generator)

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = super().collate(items)
        return inputs + torch.rand((), generator=generator), labels


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_at_the_top_of_a_module_is_exact(workers: int, tmp_path: Path) -> None:
    assert str(judge(Case(train={"workers": workers}), tmp_path, DrawsHere)) == "exact"


class HoldsIterators(ZooTask):
    """Holds iterators that no step moves on."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.iterators = iter([1, 2]), iter(range(3)), itertools.count(4)


def test_an_iterator_that_nobody_moves_on_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(Case(train={"steps": 3, "ema_decay": None}), tmp_path, HoldsIterators)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert "training changes task.losses, which" in told[0]


@pytest.mark.parametrize("kind", COUNTED)
def test_what_a_model_counts_is_told_wherever_it_is(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(Case(model=f"counts in {kind}", train={"steps": 3, "ema_decay": None}), tmp_path)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert f"{kind}, task.losses, which" in told[0]


def record(*_: Any) -> None:
    """A hook like that by which transformers records hidden states."""


class Augmentation(nn.Module):
    """As those of kornia, which keep what they drew last; and a count, which decides what they do."""

    input_dtype: torch.dtype | None = None

    def forward(self, inputs: Any) -> Any:
        if not hasattr(self, "_output_capturing_hooks_installed"):
            self.register_forward_hook(record)
            self._output_capturing_hooks_installed = True
        self.input_dtype = inputs.dtype
        self._params = {"noise": torch.randn(())}
        self.count = getattr(self, "count", 0) + 1
        return inputs + self._params["noise"] / self.count


class Metric(nn.Module):
    """As those of torchmetrics, which keep what they computed last until they are updated."""

    def __init__(self) -> None:
        super().__init__()
        self._computed = self._forward_cache = torch.zeros(())

    def forward(self, inputs: Any) -> Any:
        self._computed = self._forward_cache = inputs.detach().mean()
        return inputs


class Miner(nn.Module):
    """As those of pytorch-metric-learning, which count the pairs of each batch."""

    num_pairs = 0

    def forward(self, inputs: Any) -> Any:
        self.num_pairs = int((inputs > 0).sum())
        return inputs


class Recomputes(ZooTask):
    """Its model has attributes that each forward pass sets before it reads them, and one that it does not."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            Augmentation(),
            nn.utils.spectral_norm(nn.Linear(FEATURES, 16)),
            nn.utils.weight_norm(nn.Linear(16, 3)),
            Metric(),
            Miner(),
        )


def test_what_each_forward_pass_makes_anew_is_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Augmentation, "__module__", "kornia.augmentation.base")
    monkeypatch.setattr(Metric, "__module__", "torchmetrics.metric")
    monkeypatch.setattr(Miner, "__module__", "pytorch_metric_learning.miners.base_miner")
    monkeypatch.setattr(record, "__module__", "transformers.utils.output_capturing")
    judge(Case(train={"steps": 3, "ema_decay": None}), tmp_path, Recomputes)
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert "training changes model.0.count, task.losses, which" in told[0]


def test_what_the_task_keeps_is_exact_and_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(), tmp_path, Keeps)) == "exact"
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert not any("task.calls" in line or "task.before" in line for line in told)


def test_state_of_the_task_comes_back_with_its_types(tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, CountsLabels)) == "exact"


@pytest.mark.parametrize("kind", [Forgets, ForgetsTensor])
def test_a_task_that_does_not_take_its_state_back_is_refused(kind: type[ZooTask], tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, kind)
    assert verdict.refused_at == 2 and "load_state_dict() of the task" in (verdict.refused or ""), verdict
