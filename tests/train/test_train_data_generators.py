"""Of the global generators, only those that samples draw from are seeded for each, with the same result."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.randomness import Undisturbed


class Drawing(Dataset[Any]):
    """Draws from the generators that are named: torch, python, numpy; `rarely` from the last two."""

    def __init__(self, names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        values = [float(index)]
        values += [torch.rand(()).item()] if "torch" in self.names else []
        values += [random.random()] if "python" in self.names else []
        values += [float(np.random.rand())] if "numpy" in self.names else []
        values += [torch.initial_seed() % 1000] if "initial" in self.names else []
        if "rarely" in self.names and index % 97 == 90:
            values[0] += random.gauss(0.0, 1.0) + float(np.random.rand())
        return torch.tensor(values, dtype=torch.float64)


def stacked(items: list[Tensor]) -> Tensor:
    return torch.stack(items) + torch.rand(()) + random.random() + float(np.random.rand())


@pytest.mark.parametrize("names", ["", "torch", "python", "torch numpy", "torch rarely", "rarely", "initial"])
@pytest.mark.parametrize("collate", [default_collate, stacked])
def test_samples_are_the_same_whether_all_generators_are_seeded_or_those_in_use(names: str, collate: Any) -> None:
    all_seeded, in_use = (Fetcher(Drawing(names), collate, 1, exact=exact) for exact in (False, True))
    for begin in (0, 40, 80, 3):
        indices = np.arange(begin, begin + 40)
        assert torch.equal(all_seeded(1, indices), in_use(1, indices))


def test_however_often_generators_are_looked_at_it_is_seen_when_something_draws_from_them() -> None:
    python, numpy_, undisturbed = 1, 2, Undisturbed()
    for look in range(200):
        for number in (python, numpy_):
            undisturbed.prepare(number)
        if draws := look % 7 == 3:
            random.random()
        assert (undisturbed.holds(python), undisturbed.holds(numpy_)) == (not draws, True)
