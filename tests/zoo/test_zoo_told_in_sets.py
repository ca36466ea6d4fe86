"""What steps keep in the data set, or in place of what a class gives, is told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from zoo_data import samples
from zoo_models import mlp
from zoo_told import told
from zoo_training import ZooTask


class Remembering(Dataset[Any]):
    """Keeps for steps the loss of each sample, and for itself what it has read."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples()
        self.losses, self.cache = dict[int, float](), dict[int, Tensor]()
        self.many = np.zeros(200_000)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.inputs[index] * 2
        return self.cache[index], self.labels[index]


class Gated(nn.Module):
    """Some steps use what the one before has left in place of what the class gives."""

    left_behind: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Any:
        scores = self.inner(inputs)
        if self.left_behind is not None and len(inputs) > 100:
            scores = scores + self.left_behind
        self.left_behind = scores.detach()
        return scores


class RemembersElsewhere(ZooTask):
    def model(self) -> nn.Module:
        return Gated()

    def train_data(self) -> Dataset[Any]:
        self.remembering = Remembering()
        return self.remembering

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.remembering.losses[len(self.remembering.losses)] = loss.item()
        return loss


def test_what_steps_keep_in_the_data_set_and_in_place_of_the_class_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(RemembersElsewhere, tmp_path, capfd) == ["model.left_behind", "task.remembering"]


class RemembersNumbers(ZooTask):
    """Keeps them in an array for each of very many samples."""

    def train_data(self) -> Dataset[Any]:
        self.remembering = Remembering()
        return self.remembering

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.remembering.many[:] += 1
        return super().loss(model, batch)


def test_a_large_array_in_the_data_set_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(RemembersNumbers, tmp_path, capfd) == ["task.remembering"]


class SavesElsewhere(RemembersElsewhere):
    def model(self) -> nn.Module:
        return mlp()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.remembering.losses}

    def load_state_dict(self, state: Any) -> None:
        self.remembering.losses = state["losses"]


def test_it_is_not_told_when_it_is_saved_nor_a_cache_beside_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(SavesElsewhere, tmp_path, capfd) == []


class KnowsTheLargest(ZooTask):
    """Its batches depend on the largest number so far, which is not in the first one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.largest = 0.0

    def collate(self, items: list[Any]) -> Any:
        self.largest = max([self.largest, *(inputs.max().item() for inputs, _ in items)])
        return default_collate([(inputs / self.largest, label) for inputs, label in items])


def test_what_collate_keeps_for_later_batches_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(KnowsTheLargest, tmp_path, capfd) == ["task.largest"]
