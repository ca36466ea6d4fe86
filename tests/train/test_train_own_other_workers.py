"""Persistent workers of a loader beside the loop's are told if what they give is random: it starts over on a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, begin_attempt, new_run, tensors
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from train_ranks import run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train import join_run


def masked(samples: list[Any]) -> Any:
    """Masks some of the inputs, as for a masked language model."""
    inputs, labels = default_collate(samples)
    return inputs * (torch.rand_like(inputs) < 0.8), labels


def either(samples: list[Any]) -> Any:
    """One of two views."""
    inputs, labels = default_collate(samples)
    return random.choice([inputs, -inputs]), labels


def evaluate(model: nn.Module, loader: DataLoader[Any]) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(inputs).square().mean() for inputs, _ in loader]).mean()


def train(place: Path, collate: Callable[[list[Any]], Any], lives_on: bool) -> None:
    """A loop whose rate depends on an evaluation after each epoch."""
    begin_attempt(place, 0)
    with join_run() as run:
        torch.manual_seed(5)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        other = DataLoader(tensors(), 8, collate_fn=collate, num_workers=1, persistent_workers=lives_on)
        data = LOADERS["tensors"]()
        loader = run.resumable(data, model=model, optimizer=optimizer, scheduler=scheduler, epochs=1)
        for _ in loader.epochs():
            for inputs, _ in loader:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            scheduler.step(evaluate(model, other))


@pytest.mark.parametrize(
    ("collate", "lives_on", "is_told"),
    [(masked, True, True), (either, True, True), (masked, False, False), (default_collate, True, False)],
)
def test_random_samples_of_persistent_workers_are_told(
    collate: Callable[[list[Any]], Any], lives_on: bool, is_told: bool, tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    run_ranks(train, 1, run.path, collate, lives_on)
    told = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert ["the persistent workers of another DataLoader (of TensorDataset)" in message for message in told] == (
        [True] if is_told else []
    )
