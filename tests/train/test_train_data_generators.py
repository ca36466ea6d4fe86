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
from cluster_ddp.train.randomness import seed_host, watch


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


def test_it_is_seen_when_something_draws_from_a_generator_or_seeds_it_however_often_that_is_looked_at() -> None:
    def nothing() -> None:
        return

    def normal_twice() -> None:
        random.gauss(0.0, 1.0)
        random.gauss(0.0, 1.0)

    disturbing = {
        nothing: [],
        normal_twice: [1],
        lambda: torch.rand(624): [0],
        lambda: torch.randn(()): [0],
        lambda: torch.manual_seed(1): [0],
        lambda: np.random.normal(): [2],
        lambda: random.seed(1): [1],
        lambda: np.random.seed(1): [2],
        lambda: seed_host(3): [0, 1, 2],
    }
    for disturb, expected in [*disturbing.items()] * 40:
        untouched = [watch(number) for number in range(3)]
        disturb()
        assert [number for number, holds in enumerate(untouched) if not holds()] == expected
