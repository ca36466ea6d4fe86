"""Gradients that a custom loop adds to those of a step before are told; those of one step are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
