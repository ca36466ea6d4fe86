"""Fetching: seeded by sample, by batch where possible, the same for every number of workers."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate
from train_tasks import (
    CPU,
    SAMPLES,
    Noisy,
    Plain,
    differences,
    fetch,
    final_state,
    job,
    new_run,
    numbered,
    samples,
    train,
)

from cluster_ddp.train import DataError
from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import Loader
from cluster_ddp.train.data.order import Indices
from cluster_ddp.train.data.sets import share_memory


def test_a_sample_is_the_same_whoever_fetches_it() -> None:
    plans = [(0, [3, 4, 5]), (0, [9, 3]), (1, [3])]
    here = fetch(Noisy(), *plans)
    by_workers = fetch(Noisy(), *plans, workers=2)
    for own, other in zip(here, by_workers, strict=True):
        assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])
    assert torch.equal(here[0][0][0], here[1][0][1])  # sample 3 in epoch 0, twice
    assert not torch.equal(here[0][0][0], here[2][0][0])  # and in epoch 1


def test_random_samples_behind_a_subset_are_seeded_too() -> None:
    part = Subset(Subset(Noisy(), [10, 20, 30, 40]), [3, 1])
    random.seed(1)
    first = fetch(part, (0, [0, 1]))[0]
    random.seed(2)
    assert torch.equal(first[0], fetch(part, (0, [0, 1]))[0][0])
    assert first[1].tolist() == [int(Noisy().labels[40]), int(Noisy().labels[20])]


def test_each_copy_of_a_sample_in_a_subset_draws_numbers_of_its_own() -> None:
    plans = (0, [0, 1, 2]), (0, [1])
    (found, labels), (again, _) = fetch(Subset(Noisy(), [3, 3, 5]), *plans)
    assert labels[0] == labels[1] and not torch.equal(found[0], found[1])
    assert torch.equal(found[1], again[0])
    assert torch.equal(fetch(Subset(Noisy(), [3, 3, 5]), *plans, workers=2)[0][0], found)
    last = SAMPLES - 1
    ((_, labels),) = fetch(Subset(Noisy(), [-1, last, -1, 0]), (0, [0, 1, 2, 3]))
    assert torch.equal(labels, Noisy().labels[[last, last, last, 0]])


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)


class Masking:
    """An object that collates, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __call__(self, items: list[Any]) -> Any:
        inputs, labels = default_collate(items)
        return inputs * float(self.generator.random()), labels


@pytest.mark.parametrize("data", [Noisy(), Streamed()])
def test_a_generator_of_an_object_that_collates_is_seeded(data: Any, tmp_path: Path) -> None:
    def task() -> Plain:
        made = Plain()
        made.collate, made.train_data = Masking(), lambda: data  # type: ignore[method-assign]
        return made

    sections = {"train": {"steps": 6, "global_batch": 12}}
    whole, _ = train(task(), job(**sections), new_run(tmp_path / "calm", **sections))
    broken = new_run(tmp_path / "broken", **sections)
    train(task(), job(**sections), broken, stop_at=3)
    part, _ = train(task(), job(**sections), broken, attempt=1)
    assert differences(final_state(whole), final_state(part)) == []


def test_tensors_are_fetched_by_batch() -> None:
    inputs, labels = samples()
    batch = fetch(Subset(TensorDataset(inputs, labels), [5, 6, 7]), (0, [2, 0]))[0]
    assert torch.equal(batch[0], inputs[[7, 5]]) and torch.equal(batch[1], labels[[7, 5]])


def test_batches_are_copies_of_their_rows() -> None:
    """Changing one batch changes no other, nor the set."""
    inputs, labels = samples()
    plans = [(0, [number, 49 - number]) for number in range(49)]
    batches = fetch(TensorDataset(inputs, labels), *plans)
    for (_, indices), (found, classes) in zip(plans, batches, strict=True):
        assert torch.equal(found, inputs[indices]) and torch.equal(classes, labels[indices])
        found.zero_()
    assert inputs.abs().sum() > 0


@pytest.mark.parametrize("shape", [(16,), (7,), ()])
def test_small_batches_fetched_together_begin_where_one_alone_would(shape: tuple[int, ...]) -> None:
    """What a matrix product gives depends, in its last bits, on the alignment of its operands."""
    rows = torch.randn(50, *shape)
    plans = [(0, list(range(number, number + 8))) for number in range(40)]
    plans[20] = (0, [1, 2, 3])
    batches = fetch(TensorDataset(rows, torch.arange(50)), *plans)
    for (_, indices), (found, numbers) in zip(plans, batches, strict=True):
        assert torch.equal(found, rows[indices]) and numbers.tolist() == indices
        assert found.data_ptr() % 64 == numbers.data_ptr() % 64 == 0


class Weighs(Noisy):
    """Weighs its samples by what was counted when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = collections.Counter(a=3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs * self.counts["a"], label


@pytest.mark.parametrize("data", [Weighs(), tuple(zip(*samples(), strict=True))], ids=["counter", "tuple"])
def test_a_set_of_which_a_copy_is_tried_is_not_refused_for_the_copy(data: Any) -> None:
    assert len(Fetcher(data, default_collate, 1, exact=True)(0, np.arange(10))[0]) == 10


class CachesAtTheEnd(Noisy):
    """Keeps its samples, augmented, when all have been read once."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.keeps and len(self.kept) == len(self):
            return self.kept[index]
        self.kept[index] = super().__getitem__(index)
        return self.kept[index]


@pytest.mark.parametrize(("keeps", "workers"), [(True, 0), (True, 1), (False, 0)])
def test_a_set_that_is_another_after_a_pass_is_told(
    keeps: bool, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    fetcher = Fetcher(CachesAtTheEnd(keeps), default_collate, 1, exact=True)
    plans = [(epoch, np.arange(first, first + 10)) for epoch in range(3) for first in range(0, 50, 10)]
    loader = Loader(fetcher, plans, lambda plan: plan, workers=workers, device=CPU)
    assert len(list(loader)) == 15
    assert capfd.readouterr().err.count("(CachesAtTheEnd) returns different samples after a pass") == keeps


class Curriculum(Noisy):
    """Its samples depend on a level, which somebody sets."""

    level = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs + self.level, label


def test_a_set_that_is_changed_after_several_passes_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    data = Curriculum()

    def plans() -> Iterator[tuple[int, Any]]:
        for epoch in range(6):
            data.level = float(epoch >= 3)
            yield from ((epoch, np.arange(first, first + 10)) for first in range(0, 50, 10))

    loader = Loader(Fetcher(data, default_collate, 1, exact=True), plans(), lambda plan: plan, workers=0, device=CPU)
    assert len(list(loader)) == 30
    assert capfd.readouterr().err.count("(Curriculum) returns different samples after a pass") == 1


class Grows(Noisy):
    """Has more items when all have been read once."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return super().__getitem__(index)

    def __len__(self) -> int:
        return super().__len__() + (self.reads > super().__len__())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_that_grows_is_told(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    fetcher = Fetcher(Grows(), default_collate, 1, exact=True)
    plans = [(epoch, np.arange(first, first + 10)) for epoch in range(3) for first in range(0, 50, 10)]
    assert len(list(Loader(fetcher, plans, lambda plan: plan, workers=workers, device=CPU))) == 15
    assert capfd.readouterr().err.count("(Grows) has 51 items after a pass, but had 50 before") == 1


class Shifted(TensorDataset):
    """Rows of tensors that are changed on their way."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, label = super().__getitem__(index)
        return inputs + 7.0, label


def test_what_is_more_than_rows_of_tensors_is_not_read_as_such() -> None:
    inputs, labels = samples()
    assert torch.equal(Fetcher(Shifted(inputs, labels), default_collate, 1)(0, np.array([3]))[0], inputs[[3]] + 7.0)

    def named(items: list[Any]) -> dict[str, Tensor]:
        return {"labels": torch.stack([label for _, label in items])}

    fetcher = Fetcher(TensorDataset(inputs, labels), named, 1)
    assert torch.equal(fetcher(0, np.array([3, 4]))["labels"], labels[[3, 4]])


class ByBatch(Dataset[Any]):
    def __init__(self, as_items: bool) -> None:
        self.as_items = as_items

    def __getitems__(self, indices: list[int]) -> Any:
        values = torch.tensor(indices)
        return [{"x": value} for value in values] if self.as_items else {"x": values}


@pytest.mark.parametrize("as_items", [True, False])
def test_sets_that_fetch_by_batch(as_items: bool) -> None:
    assert fetch(ByBatch(as_items), (0, [4, 2]))[0]["x"].tolist() == [4, 2]


class Ragged(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(2 + index % 2)


def test_samples_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(DataError, match=r"samples 4, 5 do not make a batch.*\n.*a collate function of your own"):
        fetch(Ragged(), (0, [4, 5]))


def test_full_shared_memory_is_not_blamed_on_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr("torch.utils.data._utils.collate.collate", full)
    with pytest.raises(RuntimeError, match=r"^unable to allocate"):
        fetch(Ragged(), (0, [4]))


NUMBERS: dict[float, int] = {}


class NumbersInModule(Noisy):
    def __getitem__(self, index: int) -> Any:
        return numbered(self.inputs[index, 0], NUMBERS), self.labels[index]


class NumbersInCollate(Plain):
    def __init__(self) -> None:
        self.numbers: dict[float, int] = {}

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = default_collate(items)
        return torch.stack([numbered(part[0], self.numbers) for part in inputs]), labels


class OfModule(Plain):
    def train_data(self) -> Dataset[Any]:
        return NumbersInModule()


@pytest.mark.parametrize("task", [OfModule, NumbersInCollate])
def test_workers_that_number_what_they_read_are_refused_wherever_they_keep_it(task: type[Plain]) -> None:
    with pytest.raises(DataError, match="keeps something from the first samples it reads"):
        train(task(), job(train={"steps": 2, "global_batch": 12, "workers": 1}))


def test_indices_are_of_one_type() -> None:
    """What a plan hands to a set with __getitems__ are Python's ints, which any index takes."""
    seen: list[Any] = []

    class Seeing(Dataset[Any]):
        def __getitems__(self, indices: list[int]) -> Any:
            seen.extend(indices)
            return torch.zeros(len(indices))

    chosen: Indices = np.array([3, 1])
    Fetcher(Seeing(), default_collate, 1)(0, chosen)
    assert seen == [3, 1] and all(type(index) is int for index in seen)


@pytest.mark.timeout(20)
def test_a_large_set_in_memory_is_not_searched_byte_by_byte() -> None:
    """It took half a second for each MiB of the set, at each start of each rank."""
    rows, other = torch.empty(2**28, dtype=torch.uint8), {"settings": [SimpleNamespace(), np.zeros(1), torch.zeros(1)]}
    assert not share_memory([rows], [other])
    assert share_memory([rows], [other, [rows[5:]]])
