"""How the samples of an epoch are dealt out to ranks: the same on all, and on another number of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import begin_attempt, failure, new_run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.data.batches import batches_of
from cluster_ddp.train.own.geometry import Deal, Geometry
from cluster_ddp.train.ranks.distributed import find_world


def deal(samples: int, ranks: int, *, shuffle: bool = True, distributed: bool = True, drop_last: bool = False) -> Deal:
    data = TensorDataset(torch.arange(samples))
    sampler: Any = DistributedSampler(data, ranks, 0, shuffle=shuffle) if distributed else None
    own_shuffle = shuffle if sampler is None else None
    loader = DataLoader(data, 8 // ranks, own_shuffle, sampler=sampler, drop_last=drop_last)
    found = batches_of(loader, ranks, None).deal
    assert found is not None
    return found


def changed(now: Deal, was: Deal) -> str | None:
    return now.changed(dataclasses.asdict(was), 2)


def test_the_same_samples_on_another_number_of_ranks() -> None:
    assert changed(deal(96, 1), deal(96, 2)) is None
    assert changed(deal(99, 1, drop_last=True), deal(99, 2, drop_last=True)) is None
    assert changed(deal(96, 1, shuffle=False, distributed=False), deal(96, 2, shuffle=False)) is None


def test_another_sampler_on_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(TrainError, match="2 ranks with the sampler DistributedSampler, but this number of ranks"):
        changed(deal(96, 1, distributed=False), deal(96, 2))


def test_samples_that_only_fill_up_the_last_step_are_told() -> None:
    message = changed(deal(99, 1), deal(99, 2))
    assert message is not None
    assert "take 99 samples in an epoch, and 2 ranks took 100" in message


class InOrder(Sampler[int]):
    """Of a shard that each rank has for itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


def train(place: Path, samples: list[int]) -> str:
    """How two ranks end that have shards of so many samples."""
    begin_attempt(place, 0)
    own = samples[find_world().rank]
    data = TensorDataset(torch.rand(own, 4))
    try:
        with join_run() as run:
            model = DistributedDataParallel(nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(data, 4, sampler=InOrder(own), drop_last=True)
            batches = run.resumable(loader, model=model, optimizer=optimizer, epochs=1)
            for _ in batches.epochs():
                for (inputs,) in batches:
                    optimizer.zero_grad()
                    model(inputs).mean().backward()
                    optimizer.step()
    except SystemExit:
        return "failed"
    return "completed"


def test_ranks_that_have_a_set_of_their_own_each_stay_as_many() -> None:
    own = Geometry(1, 4, None, 1, 2, None)
    with pytest.raises(TrainError, match="resume with the same number of ranks"):
        Geometry(1, 4, 8, 1, 1, 32).expect_same_batches(dataclasses.asdict(own))


def test_shards_with_other_numbers_of_batches_are_refused_at_once(tmp_path: Path) -> None:
    run = new_run(tmp_path / "other")
    assert run_ranks(train, 2, run.path, [16, 20]) == ["failed"] * 2
    assert "the ranks give 4, 5 batches in an epoch" in failure(run)
    run = new_run(tmp_path / "same")
    assert run_ranks(train, 2, run.path, [16, 18]) == ["completed"] * 2
