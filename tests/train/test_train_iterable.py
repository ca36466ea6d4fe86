"""Iterable data sets of a task: resumed in the middle of a pass, and refused if they differ when read again."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from train_tasks import Plain, differences, final_state, job, new_run, numbered, samples, train

from cluster_ddp.train import DataError


class Stream(IterableDataset[Any]):
    """Items in an order of the epoch, with noise; 50 in an epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.inputs, self.labels = samples()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in np.random.RandomState(self.epoch).permutation(50):
            yield self.inputs[index] + torch.randn(12) * 0.1, self.labels[index]


class Skipping(Stream):
    """The same, able to begin later."""

    begin = 0

    def skip(self, items: int) -> None:
        self.begin = items

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for index in np.random.RandomState(self.epoch).permutation(50)[begin:]:
            yield self.inputs[index] + torch.randn(12) * 0.1, self.labels[index]


class Filtering(Skipping):
    """Leaves out some items, which its `skip()` counts."""

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for index in range(begin, 60):
            if index % 9 != 7:
                yield self.inputs[index % 50] + torch.randn(12) * 0.1, self.labels[index % 50]


class Streaming(Plain):
    def __init__(self, data: Callable[[], IterableDataset[Any]]) -> None:
        self.data = data

    def train_data(self) -> Dataset[Any]:
        return self.data()


def test_an_iterable_set_is_resumed_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 16, "global_batch": 12}, "log": {"sample_ids": True}}
    calm = new_run(tmp_path / "calm", **sections)
    whole, _ = train(Streaming(Stream), job(**sections), calm)
    assert _offsets(calm.attempt(0).samples_file(0).read_text()) == [number % 50 for number in range(16 * 12)]
    for name, data, workers in (("read", Stream, 1), ("skip", Skipping, 0)):
        broken = new_run(tmp_path / name, **sections)
        _, outcome = train(Streaming(data), job(**sections), broken, stop_at=6)
        assert not outcome.completed
        again = job(**{**sections, "train": {**sections["train"], "workers": workers}})
        part, _ = train(Streaming(data), again, broken, attempt=1)
        assert differences(final_state(whole), final_state(part)) == []


def test_a_skip_that_counts_other_items_is_not_used(tmp_path: Path) -> None:
    sections = {"train": {"steps": 4, "global_batch": 12}}
    whole, _ = train(Streaming(Filtering), job(**sections), new_run(tmp_path / "calm", **sections))
    broken = new_run(tmp_path / "broken", **sections)
    train(Streaming(Filtering), job(**sections), broken, stop_at=2)
    part, _ = train(Streaming(Filtering), job(**sections), broken, attempt=1)
    assert differences(final_state(whole), final_state(part)) == []


class Flipping(IterableDataset[Any]):
    """Rarely flips an item, by a generator of its own, and none of the first."""

    def __init__(self, kind: str) -> None:
        self.inputs, self.labels = samples()
        self.rng = random.Random(0) if kind == "random" else np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        for index in range(50):
            is_flipped = self.rng.random() < 0.3 and index > 5
            yield self.inputs[index].flip(0) if is_flipped else self.inputs[index], self.labels[index]


class Restarting(Flipping):
    """Restarts the generator with each pass."""

    def __iter__(self) -> Iterator[Any]:
        self.rng = random.Random(0)
        yield from super().__iter__()


class FlippingLate(Flipping):
    """Draws nothing for the first items."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(50):
            is_flipped = index > 5 and self.rng.random() < 0.3
            yield self.inputs[index].flip(0) if is_flipped else self.inputs[index], self.labels[index]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("data", "kind"), [(Flipping, "random"), (Flipping, "numpy"), (Restarting, "random")])
def test_a_generator_of_a_set_that_its_first_items_do_not_show_is_seeded(
    data: type[Flipping], kind: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sections = {"train": {"steps": 10, "global_batch": 12, "workers": workers}}
    make = functools.partial(data, kind)
    whole, _ = train(Streaming(make), job(**sections), new_run(tmp_path / "calm", **sections))
    broken = new_run(tmp_path / "broken", **sections)
    train(Streaming(make), job(**sections), broken, stop_at=6)
    part, _ = train(Streaming(make), job(**sections), broken, attempt=1)
    assert differences(final_state(whole), final_state(part)) == []
    assert "different items after a pass" not in capfd.readouterr().err


def test_a_generator_from_which_the_first_items_do_not_draw_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    train(Streaming(lambda: FlippingLate("random")), job(train={"steps": 10, "global_batch": 12}))
    assert "returns different items after a pass than before it" in capfd.readouterr().err


def _offsets(lines: str) -> list[int]:
    import json

    return [index for line in lines.splitlines() for index in json.loads(line)["ids"]]


class Caching(Stream):
    """Keeps its items as they were in its first pass, augmentation and all."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        for index in np.random.RandomState(self.epoch).permutation(50):
            if index not in self.cache:
                self.cache[index] = self.inputs[index] + torch.randn(12) * 0.1
            yield self.cache[index], self.labels[index]


def test_an_iterable_set_that_keeps_its_first_augmentation_is_refused() -> None:
    with pytest.raises(DataError, match="draws the random numbers of an item when it is read for the first time"):
        train(Streaming(Caching), job(train={"steps": 2, "global_batch": 12}))


class CountsItsPasses(Stream):
    """Takes its order from how many passes have ended."""

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.epoch += 1


class KeepsTheRest(Stream):
    """Begins a pass with what did not fill a block of the pass before."""

    rest: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        items = [*self.rest, *super().__iter__()]
        yield from items[:44]
        self.rest = tuple(items[44:])


@pytest.mark.parametrize(
    ("data", "is_told"), [(CountsItsPasses, True), (KeepsTheRest, True), (Stream, False), (Skipping, False)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_set_that_a_pass_changes_is_told(
    data: type[Stream], is_told: bool, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    train(Streaming(data), job(train={"steps": 12, "global_batch": 12, "workers": workers}))
    said = capfd.readouterr().err
    assert said.count(f"({data.__name__}) returns different items after a pass than before it") == is_told


class NumbersItems(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[float, int] = {}

    def __iter__(self) -> Iterator[Any]:
        for inputs, labels in super().__iter__():
            yield numbered(inputs[0], self.numbers), labels


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_set_that_numbers_its_items_is_refused(workers: int) -> None:
    with pytest.raises(DataError, match="gives different items after others have been read"):
        train(Streaming(NumbersItems), job(train={"steps": 2, "global_batch": 12, "workers": workers}))


def test_an_iterable_set_without_length_needs_steps() -> None:
    with pytest.raises(DataError, match=r"set train\.steps"):
        train(Streaming(Stream), job(train={"epochs": 1, "global_batch": 12}))


def test_an_empty_stream_is_no_endless_loop() -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(DataError, match="yielded no item in epoch 0"):
        train(Streaming(Nothing), job(train={"steps": 2, "global_batch": 4}))
