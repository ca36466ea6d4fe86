"""A data set and a model that Trainers of transformers train in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Rows(Dataset[Any]):
    def __init__(self, first: int = 0) -> None:
        self.labels = [first, *range(1, 24)]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), index / 24) + 0.1 * torch.randn(4), "labels": torch.tensor(index % 3)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layer(x)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}
