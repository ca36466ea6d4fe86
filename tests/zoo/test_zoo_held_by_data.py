"""Caches of a data set, and a collator that holds the model: exact, or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from zoo_models import CLASSES, FEATURES
from zoo_told import told
from zoo_training import Case, ZooTask, judge


class Collator:
    """Draws from a generator that it makes when it is called first, and holds the model for its settings."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self.generator: torch.Generator | None = None

    def __call__(self, items: list[Any]) -> Any:
        self.generator = self.generator or torch.Generator().manual_seed(0)
        inputs, labels = default_collate(items)
        return inputs + torch.randn(inputs.shape, generator=self.generator), labels


class CollatesBy(ZooTask):
    """Batches by a collator of a library."""

    def model(self) -> nn.Module:
        self.collator = Collator(made := super().model())
        return made

    def collate(self, items: list[Any]) -> Any:
        return self.collator(items)


@pytest.mark.parametrize("data", ["map", "iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_collator_of_a_library_that_holds_the_model_is_exact_and_not_told(
    workers: int, data: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collator, "__module__", "transformers.data.data_collator")
    assert str(judge(Case(data=data, train={"workers": workers}), tmp_path, CollatesBy)) == "exact"
    assert "from which samples or batches are made" not in capfd.readouterr().err


class Attacked(Dataset[Any]):
    """Makes samples by the model that is trained."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.inputs = model, torch.randn(44, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        weight = next(self.model.parameters()).detach()
        return self.inputs[index] + weight[index % len(weight)].cpu().sign(), index % CLASSES


class Attacks(ZooTask):
    """Trains on samples that are made to be hard for the model."""

    def model(self) -> nn.Module:
        self.network = super().model()
        return self.network

    def train_data(self) -> Dataset[Any]:
        return Attacked(self.network)


def test_samples_that_the_model_makes_are_exact_and_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(), tmp_path, Attacks)) == "exact"
    said = capfd.readouterr().err
    assert "after a pass" not in said and "has changed since" not in said


DOUBLED: dict[int, Tensor] = {}


class Caching(Dataset[Any]):
    """Keeps what it has computed, in tensors and in a variable."""

    def __init__(self) -> None:
        self.inputs = torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(1))
        self.halves, self.is_known = torch.zeros(48, FEATURES), torch.zeros(48, dtype=torch.bool)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if not self.is_known[index]:
            self.is_known[index] = True
            self.halves[index] = self.inputs[index] / 2
        if index not in DOUBLED:
            DOUBLED[index] = self.inputs[index] * 2
        return self.halves[index] + DOUBLED[index], index % CLASSES


class KeepsCaches(ZooTask):
    def train_data(self) -> Dataset[Any]:
        DOUBLED.clear()
        self.kept = Caching()
        return self.kept


class ReadsCaches(KeepsCaches):
    """Its loss depends on how much has been read."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + len(DOUBLED) + self.kept.is_known.sum())


@pytest.mark.parametrize(("task", "names"), [(KeepsCaches, []), (ReadsCaches, ["task.kept", f"{__name__}.DOUBLED"])])
def test_caches_of_samples_are_told_only_where_steps_use_them(
    task: type[ZooTask], names: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(task, tmp_path, capfd) == sorted(names)
