"""Tasks whose resume is not exact, for different reasons."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from cluster_ddp.train import Task


class Counting(Task):
    """Its loss depends on a count that no checkpoint contains."""

    def __init__(self) -> None:
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def train_data(self) -> TensorDataset:
        rows = torch.arange(128.0).reshape(32, 4) / 128
        return TensorDataset(rows, torch.arange(32) % 2)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.calls += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * self.calls


class Unrepeatable(Counting):
    """Its loss depends on the time."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * (time.time_ns() % 1000)
