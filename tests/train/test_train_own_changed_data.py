"""What the code after the batches of an epoch changes in the data set or its sampler is reported."""

from __future__ import annotations

import contextlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from own_loops import Images, begin_attempt, interrupt, model_of, new_run, told
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.own.values import fingerprint_of
from cluster_ddp.train.own.watch.changed_data import ChangedData


class Noise:
    """An augmentation that notes what it did last."""

    strength = drawn = 0.0

    def __call__(self, sample: Tensor) -> Tensor:
        self.drawn = float(torch.randn(()))
        return sample + self.strength * self.drawn


class Graded(Images):
    """Harder from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.labels = 0.0, torch.zeros(18)
        self.augments, self.is_read = True, False
        self.cache, self.transforms = torch.zeros(len(self), 2), [Noise()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not self.cache[index].any():
            self._fill(index)
        sample, label = super().__getitem__(index)
        return self.transforms[0](sample), label

    def _fill(self, index: int) -> None:
        self.cache[index] = index + 1
        self.is_read = True


def train(place: Path, kind: str) -> None:
    """A loop that changes its data in the way of this kind."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = Graded()
        sampler = WeightedRandomSampler(torch.ones(18, dtype=torch.float64), 12)
        workers = 1 if kind == "before, with persistent workers" else 0
        subset, persistent = Subset(data, range(18)), workers > 0
        loader = DataLoader(subset, batch_size=6, sampler=sampler, num_workers=workers, persistent_workers=persistent)
        generator = torch.Generator() if kind == "loader with a generator" else None
        other = DataLoader(Images(), batch_size=6, shuffle=True, generator=generator)
        loader = run.resumable(loader, model=model, optimizer=optimizer, epochs=3)
        for epoch in loader.epochs():
            if "before" in kind:
                data.level = 0.1 * epoch
            for number, (inputs, labels) in loader.enumerate():
                optimizer.zero_grad()
                F.cross_entropy(model(inputs + data.level), labels).backward()
                optimizer.step()
                if kind == "labels in steps":
                    data.labels[:2] = number
                elif kind == "sampler in steps":
                    sampler.weights[number] = 2.0
                if kind == "sampler, and leaves" and number == 0:
                    break
            if "loader" in kind:
                list(other)
            elif kind == "read":
                list(DataLoader(data))
            elif kind == "data":
                data.level += 0.1
                data.augments = False
            elif kind == "transform":
                data.transforms[0].strength += 0.1
            elif kind == "labels":
                data.labels[epoch] = 1.0
            elif kind == "sampler, and leaves":
                sampler.weights *= torch.rand(18)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("before", []),
        ("loader", []),
        ("read", []),
        ("loader with a generator", ["changes the generator that shuffles another DataLoader (of Images),"]),
        ("before, with persistent workers", ["Graded.level has changed since the persistent workers began"]),
        ("data", ["changes Graded.augments, Graded.level,"]),
        ("transform", ["changes Noise.strength,"]),
        ("labels", ["changes Graded.labels,"]),
        ("labels in steps", ["steps change Graded.labels,"]),
        ("sampler in steps", ["steps change WeightedRandomSampler.weights,"]),
        ("sampler, and leaves", ["changes WeightedRandomSampler.weights,"]),
    ],
)
def test_changes_after_the_batches_are_reported_once(kind: str, what: list[str], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train, 1, run.path, kind)
    assert [part in message for part, message in zip(what, told(run), strict=True)] == [True] * len(what)


def sets(place: Path, attempt: int, how: str, at: tuple[int, int]) -> None:
    """A loop that sets something in its data before the batches of each epoch, or of one; stopped in one of them."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        model, data = model_of(), Graded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.resumable(DataLoader(data, batch_size=11), model=model, optimizer=optimizer, epochs=3)
        for epoch in loader.epochs():
            if how == "in one epoch":
                data.augments = data.augments and epoch != 1
            else:
                data.level = 0.1 * epoch if how == "by epoch" else data.level + 0.1
            for number, (inputs, labels) in loader.enumerate():
                optimizer.zero_grad()
                F.cross_entropy(model(inputs + data.level), labels).backward()
                optimizer.step()
                if (attempt, epoch, number) == (0, *at):
                    interrupt("stop")


def twice(place: Path, how: str, at: tuple[int, int]) -> None:
    for attempt in range(2):
        sets(place, attempt, how, at)


@pytest.mark.parametrize(
    ("how", "at", "what"),
    [
        ("by epoch", (1, 1), []),
        ("by epoch", (1, 3), []),
        ("from itself", (1, 1), ["Graded.level is not what it was when the batches of this epoch"]),
        ("from itself", (1, 3), ["Graded.level is not what it was when the batches of the previous epoch"]),
        ("in one epoch", (1, 3), ["Graded.augments is not what it was when the batches of the previous epoch"]),
    ],
)
def test_a_resume_at_which_the_data_are_set_otherwise_is_told(
    how: str, at: tuple[int, int], what: list[str], tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    run_ranks(twice, 1, run.path, how, at)
    assert [message.split(" began")[0] for message in told(run)] == what


def test_what_the_data_pipes_of_torch_count_themselves_is_not_told() -> None:
    messages: list[str] = []
    pipe = IterableWrapper(range(8)).shuffle()
    changed = ChangedData(pipe, [], messages.append)
    was = changed.compare(None, None, is_within=False)
    assert len(list(pipe)) == 8
    changed.compare(was, was, is_within=True)
    assert messages == []


def test_looking_at_a_table_that_is_stored_by_columns_does_not_copy_it() -> None:
    rows = np.arange(1_000_000.0).reshape(1000, 1000)
    columns = np.asfortranarray(rows)
    assert fingerprint_of(columns) == fingerprint_of(rows)
    assert fingerprint_of(torch.from_numpy(columns)) == fingerprint_of(torch.from_numpy(rows))
    tracemalloc.start()
    try:
        fingerprint_of(columns)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
