"""What samples are made from is compared whatever its kind: no value makes a look at it fail, or hides another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from cluster_ddp.train.data.made_from import MadeFrom


class Time:
    """As a time of pandas, which can be an array, too, but is of no length."""

    def to_numpy(self) -> Any:
        return np.datetime64("2026-01-01")


class Wraps(torch.Tensor):
    """A tensor of a class of its own, which has no memory."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


KINDS = {
    "time": Time(),
    "meta": torch.ones(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "rows": torch.eye(3).to_sparse_csr(),
    "wraps": Wraps(),
}


class Holds(Dataset[Any]):
    def __init__(self, part: Any) -> None:
        self.part, self.labels, self.weights = part, torch.zeros(4), torch.zeros(4)

    def __getitem__(self, index: int) -> Any:
        return self.part, self.labels[index], self.weights[index]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_data_set_holds_the_rest_is_compared(kind: str) -> None:
    data = Holds(KINDS[kind])
    task = SimpleNamespace(part=data.part, labels=data.labels)
    made_from = MadeFrom(data, why="as it is", is_read_here=True, put_back_by=task)
    made_from.begin()
    made_from.end()
    made_from.put_back(vars(task), SimpleNamespace(part=None, labels=data.labels.clone()))
    data.labels += 1
    data.weights += 1
    made_from.end()
    assert made_from.changed() == "training changes Holds.labels, from which samples or batches are made, as it is"
