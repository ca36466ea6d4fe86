"""A second DataLoader that is read from step to step is told: its place is in no checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, Endless, begin_attempt, new_run, tensors
from torch import nn
from torch.utils.data import DataLoader
from train_ranks import run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train import join_run
from cluster_ddp.train.own.watch.first_steps import FirstSteps
from cluster_ddp.train.own.watch.other_loaders import watch_other_loaders

STEPS = 3


def told(steps: Iterator[Any], own: Any = None) -> list[str]:
    """What is told of a loop over these."""
    messages: list[str] = []
    first = FirstSteps([watch_other_loaders(own, messages.append)])
    for _ in zip(range(STEPS), steps, strict=False):
        first.end_step()
    return messages


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_goes_on_beside_the_steps_is_told_once(workers: int) -> None:
    (message,) = told(iter(DataLoader(tensors(), 4, num_workers=workers, multiprocessing_context=fork(workers))))
    assert message.startswith("the steps read from another DataLoader (of TensorDataset)")


def fork(workers: int) -> str | None:
    return "fork" if workers else None


def test_the_loop_s_own_loader_is_none() -> None:
    data = tensors()
    assert told(iter(DataLoader(data, 4)), data) == []


def test_an_iterator_without_a_length_goes_on_too() -> None:
    (message,) = told(Endless(tensors(), 4).iterator)
    assert message.startswith("the steps read from another DataLoader (of TensorDataset)")


def test_two_batches_that_are_given_again_and_again_are_told() -> None:
    """The loop asks them before its own loader, so that they are through before the second step is looked at."""
    steps = itertools.cycle(DataLoader(tensors(), 22))
    next(steps)
    (message,) = told(steps)
    assert message.startswith("the steps read from another DataLoader (of TensorDataset)")


def test_a_pass_within_a_step_is_none() -> None:
    loader, before = DataLoader(tensors(), 4), iter(DataLoader(tensors(), 4))
    next(before)  # looked at before the loop, and kept
    assert told(list(loader) for _ in range(STEPS)) == []


def train(place: Path, kind: str) -> None:
    """A loop by steps over a loader of its own, or over a resumable one beside which another is read."""
    begin_attempt(place, 0)
    with join_run() as run:
        torch.manual_seed(5)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        more: Iterator[Any] = iter(DataLoader(tensors(), 6))
        if kind != "iterator":
            more = itertools.cycle(more)
        if kind != "pair":
            steps: Iterator[Any] = (next(more) for _ in run.steps(STEPS, model=model, optimizer=optimizer))
        else:
            loader = run.resumable(LOADERS["tensors"](), model=model, optimizer=optimizer, epochs=1)
            steps = (batch for _ in loader.epochs() for batch, _ in zip(loader, more, strict=False))
        for inputs, _ in steps:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("kind", ["steps", "iterator", "pair"])
def test_a_run_records_it(kind: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train, 1, run.path, kind)
    (warning,) = [event for event in read_events(run) if event["event"] == "warning"]
    assert "the steps read from another DataLoader" in warning["message"]
