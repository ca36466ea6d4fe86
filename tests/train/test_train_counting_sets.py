"""Data sets whose samples depend on what has been read before, or on which thread reads them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from train_tasks import Noisy

from cluster_ddp.train.data.fetch import LOOK, Fetcher
from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.data.loader import Loader
from cluster_ddp.train.errors import DataError

CPU = torch.device("cpu")


class Counts(Noisy):
    """Counts what it reads; long after the start, its samples depend on that."""

    reads = batches = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        inputs, label = super().__getitem__(index)
        return inputs * (1 + self.reads // 1000), label

    def collate(self, items: list[Any]) -> Any:
        self.batches += 1
        return default_collate(items)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_that_counts_what_it_reads_is_told(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    data = Counts()
    fetcher = Fetcher(data, data.collate, 1, exact=True)
    plans = [(0, np.arange(first, first + 10)) for first in range(0, 50, 10)]
    assert len(list(Loader(fetcher, plans, lambda plan: plan, workers=workers, device=CPU))) == 5
    said = capfd.readouterr().err
    assert said.count("(Counts) changes Counts.batches, Counts.reads, which no checkpoint") == 1
    assert "If it is only printed or logged, ignore this" in said


@dataclass
class Pictures:
    """A batch that is an object, as detectors use them."""

    inputs: Tensor
    name: str
    whole: Pictures | None = None


class Drawing(Noisy):
    """Draws its noise from the operating system, and gives objects that refer to themselves."""

    def __getitem__(self, index: int) -> Any:
        noise = float(np.random.default_rng().normal())
        picture = Pictures(super().__getitem__(index)[0] + noise, str(index))
        picture.whole = picture
        return picture

    def collate(self, items: list[Any]) -> Any:
        return {item.name: item for item in items}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_in_objects_is_compared(workers: int) -> None:
    data = Drawing()
    fetcher = Fetcher(data, data.collate, 1, exact=True)
    with pytest.raises(DataError, match="differs when it is fetched again"):
        list(Loader(fetcher, [(0, np.arange(10))], lambda plan: plan, workers=workers, device=CPU))


def test_an_object_may_refer_to_its_data_set() -> None:
    data = Counts()
    sample = Pictures(torch.zeros(2), "")
    sample.whole = data  # type: ignore[assignment]
    before = fingerprint(sample)
    data.reads += 1
    assert fingerprint(sample) == before
    sample.inputs = torch.ones(2)
    assert fingerprint(sample) != before


class Measuring(Noisy):
    """Gives objects that it keeps, and that compute something when they are collated."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = [Pictures(inputs, "") for inputs in self.inputs]

    def __getitem__(self, index: int) -> Any:
        return self.pictures[index]

    def collate(self, items: list[Any]) -> Any:
        for item in items:
            item.name = item.name or str(item.inputs.norm())
        return items


def test_what_objects_compute_when_they_are_collated_is_no_change() -> None:
    data = Measuring()
    fetcher = Fetcher(data, data.collate, 1, exact=True)
    seen = fetcher(LOOK, np.arange(4))
    fetcher(0, np.arange(10))
    assert fetcher(LOOK, np.arange(4)) == seen


TIMES: dict[int, int] = {}


class CountsEach(Noisy):
    """Counts how often it has read each sample, in an array, in a tensor and in a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.tensor, self.cache = np.zeros(50, int), torch.zeros(50), np.zeros(50)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.array[index] += 1
        self.tensor[index] += 1
        self.cache[index] = 1
        TIMES[index] = TIMES.get(index, 0) + 1
        return super().__getitem__(index)


def test_counts_in_arrays_and_variables_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    Fetcher(CountsEach(), default_collate, 1, exact=True)(0, np.arange(10))
    said = capfd.readouterr().err
    assert f"changes CountsEach.array, CountsEach.tensor, {__name__}.TIMES, which no checkpoint" in said


class Record:
    def __init__(self, index: int) -> None:
        self.index = index


class Cached(Noisy):
    """Keeps the last few records that it has made."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.records = [*getattr(self, "records", []), Record(index)][-4:]
        return super().__getitem__(self.records[-1].index)


def test_a_small_cache_whose_objects_are_recomputed_is_not_told(capfd: pytest.CaptureFixture[str]) -> None:
    data = Cached()
    fetcher = Fetcher(data, default_collate, 1, exact=True)
    assert len(list(Loader(fetcher, [(0, np.arange(10))], lambda plan: plan, workers=0, device=CPU))) == 1
    assert "no checkpoint" not in capfd.readouterr().err


class Pooled(Dataset[Tensor]):
    """Draws in threads; in what order is another only once in a while, as if that were the scheduler's doing."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.reads = [0]

    def __len__(self) -> int:
        return 50

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.pool = self.pool or ThreadPoolExecutor(1)
        self.reads[0] += 1
        order = indices[:: -1 if self.reads[0] % 20 == 0 else 1]
        drawn = dict(zip(order, self.pool.map(lambda _: torch.randn(3), order), strict=True))
        return [drawn[index] for index in indices]


def test_a_set_that_draws_in_threads_is_tried_until_their_order_shows() -> None:
    with pytest.raises(DataError, match="or in threads of its own"):
        Fetcher(Pooled(), default_collate, 1, exact=True)(0, np.arange(10))
