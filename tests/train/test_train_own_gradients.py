"""Gradients of a custom loop: those added to a previous step's are told, and those of zeros come back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, begin_attempt, digest, interrupt, model_of, new_run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.own.watch.gradients import CarriedGradients


def told(zero: str, every: int = 1, rarer: bool = False) -> list[str]:
    """What is told of a loop that steps after so many batches, and zeroes gradients so; `rarer` steps half as often."""
    messages: list[str] = []
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.children() if list(part.parameters())]
    gradients = CarriedGradients(optimizers, messages.append)
    for number in range(1, 9):
        updates = number % every == 0
        for which, optimizer in enumerate(optimizers):
            if zero == "before" and (which or not rarer):
                optimizer.zero_grad(set_to_none=bool(which))
        model(torch.tensor([[number % 4, 1]])).sum().backward()
        for which, optimizer in enumerate(optimizers):
            if updates and (which or not rarer or number % 2 == 0):
                optimizer.step()
                if zero != "never":
                    optimizer.zero_grad()
        gradients.end_step(updated=updates)
    return messages


@pytest.mark.parametrize("way", [("before",), ("after",), ("after", 2), ("before", 1, False)])
def test_gradients_of_one_update_are_not_told(way: tuple[str, int, bool]) -> None:
    assert told(*way) == []


@pytest.mark.parametrize("way", [("never",), ("never", 2), ("after", 1, True)])
def test_gradients_from_before_the_last_update_are_told_once(way: tuple[str, int, bool]) -> None:
    (message,) = told(*way)
    assert "an update of SGD has gradients in it from before the last update" in message


class Heads(nn.Module):
    """Each batch trains one of them, and an embedding with sparse gradients or none."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))
        self.words = nn.Embedding(4, 3, sparse=True)

    def forward(self, step: int) -> Any:
        inputs = torch.ones(2, 3) if step % 3 else self.words(torch.tensor([step % 4]))
        return self.heads[step % 3](inputs).sum()


def unfreeze_later(place: Path, attempt: int, at: int | None) -> str | None:
    """A digest of a model, of which the loop freezes a layer before it begins, and unfreezes it in the second epoch."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.resumable(LOADERS["tensors"](), model=model, optimizer=optimizer, epochs=3)
        model[0].requires_grad_(False)  # type: ignore[index]
        for epoch in loader.epochs():
            if epoch == 1:
                model[0].requires_grad_()  # type: ignore[index]
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if run.step == at:
                    interrupt("crash")
        return digest(model)
    return None


def test_a_layer_that_was_unfrozen_in_an_earlier_epoch_is_trained_after_a_resume(tmp_path: Path) -> None:
    calm, stopped = new_run(tmp_path / "calm"), new_run(tmp_path / "stopped")
    wanted = run_ranks(unfreeze_later, 1, calm.path, 0, None)
    assert run_ranks(unfreeze_later, 1, stopped.path, 0, 17) == [None]
    assert run_ranks(unfreeze_later, 1, stopped.path, 1, None) == wanted != [None]


def train_heads(place: Path, attempt: int, at: int | None, *, to_none: bool) -> str | None:
    """A digest of the heads at the end; None if it was interrupted."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = Heads()
        optimizers = [
            torch.optim.Adam(model.heads.parameters(), lr=0.1),
            torch.optim.SparseAdam(model.words.parameters(), lr=0.1),
        ]
        for step in run.steps(9, model=model, optimizers=optimizers):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            model(step).backward()
            for optimizer in optimizers:
                optimizer.step()
            if step == at:
                interrupt("crash")
        return digest(model)
    return None


@pytest.mark.parametrize("to_none", [True, False])
def test_weights_with_a_gradient_of_zeros_are_updated_after_a_resume_too(to_none: bool, tmp_path: Path) -> None:
    calm, stopped = new_run(tmp_path / "calm"), new_run(tmp_path / "stopped")
    wanted = run_ranks(train_heads, 1, calm.path, 0, None, to_none=to_none)
    assert run_ranks(train_heads, 1, stopped.path, 0, 4, to_none=to_none) == [None]
    assert run_ranks(train_heads, 1, stopped.path, 1, None, to_none=to_none) == wanted != [None]


def train_views(place: Path, attempt: int, at: int | None, *, find_unused: bool) -> str | None:
    """A digest of a model whose gradients are views of DDP's buckets, and set to zeros by each step."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(model_of(), gradient_as_bucket_view=True, find_unused_parameters=find_unused)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(9, model=model, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.arange(4) % 3).backward()
            optimizer.step()
            if step == at:
                interrupt("crash")
        return digest(model.module)
    return None


@pytest.mark.parametrize("find_unused", [False, True])
def test_gradients_that_are_views_of_buckets_are_views_after_a_resume(find_unused: bool, tmp_path: Path) -> None:
    """DDP divides these by the number of ranks, and multiplies others by its inverse: on three ranks, other bits."""
    calm, stopped = new_run(tmp_path / "calm"), new_run(tmp_path / "stopped")
    wanted = run_ranks(train_views, 3, calm.path, 0, None, find_unused=find_unused)
    assert run_ranks(train_views, 3, stopped.path, 0, 4, find_unused=find_unused) == [None] * 3
    assert run_ranks(train_views, 3, stopped.path, 1, None, find_unused=find_unused) == wanted != [None] * 3
