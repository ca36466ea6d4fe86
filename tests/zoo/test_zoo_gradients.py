"""Gradients outside the model: those that steps add up are told, those that they set to zero are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam
from zoo_models import CLASSES
from zoo_told import told
from zoo_training import ZooTask


class Accumulates(ZooTask):
    """Adds up gradients of a critic over several steps; those of another network are new in each."""

    def model(self) -> nn.Module:
        self.critic, self.judge, self.unread = (nn.Linear(CLASSES, 1) for _ in range(3))
        self.second = Adam([*self.critic.parameters(), *self.judge.parameters()])
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.judge.zero_grad()
        for network in (self.critic, self.judge, self.unread):
            network(torch.ones(CLASSES)).sum().backward()
        return super().loss(model, batch)


def test_gradients_that_add_up_over_steps_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Accumulates, tmp_path, capfd) == ["the gradients in task.critic"]


class SetsToZero(ZooTask):
    """Sets gradients of a critic to zero before they add up, and of a judge after they were used."""

    def model(self) -> nn.Module:
        self.critic, self.judge = (nn.Linear(CLASSES, 1) for _ in range(2))
        self.optimizers = [Adam(network.parameters()) for network in (self.critic, self.judge)]
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.optimizers[0].zero_grad(set_to_none=False)
        for network, optimizer in zip((self.critic, self.judge), self.optimizers, strict=True):
            network(torch.ones(CLASSES)).sum().backward()
            optimizer.step()
        self.optimizers[1].zero_grad(set_to_none=False)
        return super().loss(model, batch)

    def parts(self) -> list[Any]:
        return [self.critic, self.judge, *self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, of_part in zip(self.parts(), state["parts"], strict=True):
            part.load_state_dict(of_part)


def test_gradients_that_are_set_to_zero_are_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(SetsToZero, tmp_path, capfd, steps=6) == []
