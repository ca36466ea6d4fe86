"""Collating the items of an iterable data set: seeded, and refused if it does not make the same batch again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate
from train_tasks import Plain, differences, final_state, job, new_run, samples, train

from cluster_ddp.train import DataError


class Stream(IterableDataset[Any]):
    """Draws from a generator of its own after its first items."""

    def __init__(self) -> None:
        self.own = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        for number, (inputs, label) in enumerate(zip(*samples(), strict=True)):
            yield inputs + (self.own.random() if number > 10 else 0.0), label


class Streaming(Plain):
    def train_data(self) -> Dataset[Any]:
        return Stream()

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = default_collate(items)
        return self.changed(inputs), labels

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs


class AddsNoise(Streaming):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(1)

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs + float(self.noise.random())


class AddsAnyNoise(Streaming):
    def changed(self, inputs: Tensor) -> Tensor:
        return inputs + float(np.random.default_rng().random())


class KeepsMean(Streaming):
    mean = torch.zeros(())

    def changed(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean()
        return inputs - self.mean


class SavesMean(KeepsMean):
    """Has a state that a resume restores, which is enough without workers."""

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        self.mean = state["mean"]


class NumbersValues(Streaming):
    def __init__(self) -> None:
        self.numbers: dict[float, int] = {}

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tensor([[self.numbers.setdefault(float(row[0]), len(self.numbers))] for row in inputs])


@pytest.mark.parametrize(
    ("task", "workers"),
    [(AddsAnyNoise, 0), (AddsAnyNoise, 1), (KeepsMean, 0), (KeepsMean, 1), (SavesMean, 1), (NumbersValues, 1)],
)
def test_a_collate_that_makes_another_batch_of_the_same_items_is_refused(task: type[Plain], workers: int) -> None:
    with pytest.raises(DataError, match=r"collate\(\) makes a different batch from the same items"):
        train(task(), job(train={"steps": 2, "global_batch": 12, "workers": workers}))


@pytest.mark.parametrize(("task", "workers"), [(AddsNoise, 0), (AddsNoise, 1), (SavesMean, 0)])
def test_a_collate_with_a_generator_or_a_saved_mean_is_exact(task: type[Plain], workers: int, tmp_path: Path) -> None:
    spec = job(train={"steps": 6, "global_batch": 12, "workers": workers})
    whole, _ = train(task(), spec)
    run = new_run(tmp_path, train={"steps": 6, "global_batch": 12, "workers": workers})
    train(task(), spec, run, stop_at=3)
    part, _ = train(task(), spec, run, attempt=1)
    assert differences(final_state(whole), final_state(part)) == []
