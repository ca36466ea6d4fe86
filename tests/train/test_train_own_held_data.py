"""A resume with other data of the same length, such as another split, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import SAMPLES, Images, Rows, failure, loop, new_run, tensors, told
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from train_ranks import run_ranks

from cluster_ddp.train.own.data.held_data import held_data, held_rows


class Arrays(Dataset[Any]):
    """Made of arrays, as of a table; with a folder that is another one in each job."""

    def __init__(self, inputs: Any, folder: str = "/scratch/1") -> None:
        self.inputs, self.folder, self.names = inputs, folder, [folder] * 3


def split(seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(SAMPLES)[:30].tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: Subset(Images(), split(seed)),
        lambda seed: Subset(Subset(Images(), split(1)), np.array(split(seed))),
        lambda seed: ConcatDataset([tensors(), Subset(Images(), split(seed))]),
        lambda seed: TensorDataset(torch.arange(600), torch.randn(600, generator=torch.Generator().manual_seed(seed))),
        lambda seed: Subset(Images(), torch.tensor(split(seed))),
        lambda seed: Arrays([np.random.default_rng(seed).random() for _ in range(500)]),
    ],
)
def test_what_a_set_holds_tells_it_from_another(make: Any) -> None:
    assert held_data(make(1)) == held_data(make(1)) != held_data(make(2))


def test_what_may_change_between_jobs_is_left_out(tmp_path: Path) -> None:
    assert held_data(Arrays([], "/scratch/1")) is None
    assert held_data(Arrays([1, 2], "/scratch/1")) == held_data(Arrays([1, 2], "/scratch/2"))
    for cache in (np.empty(4), torch.empty(4), np.memmap(tmp_path / "cache", mode="w+", shape=4)):
        assert held_data(Arrays(cache)) is None
    assert held_data(Arrays([10**400])) is not None
    assert held_data(TensorDataset(torch.nested.nested_tensor([torch.ones(2)] * 2))) is not None
    assert held_data(list(range(5))) is not None
    assert held_data([(0, "a")] * 500) is None


class Table(Dataset[Any]):
    """The rows of a split, as people hold them."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.files, self.cache = rows, ["/scratch/1"] * SAMPLES, {}

    def __len__(self) -> int:
        return SAMPLES


class Frame:
    """As pandas has it."""

    def __init__(self, rows: Any) -> None:
        self.rows = self.iloc = rows

    def __len__(self) -> int:
        return len(self.rows)


@pytest.mark.parametrize(
    "hold",
    [
        lambda rows: rows,
        torch.from_numpy,
        Frame,
        lambda rows: [(f"/scratch/{number}", torch.from_numpy(row)) for number, row in enumerate(rows)],
        lambda rows: [{"text": "a", "label": float(row[0])} for row in rows],
    ],
)
def test_rows_that_a_set_holds_tell_it_from_another(hold: Any) -> None:
    one, same, other = (np.random.default_rng(seed).random((SAMPLES, 2)) for seed in (1, 1, 2))
    assert held_rows(Table(hold(one))) == held_rows(Table(hold(same))) != held_rows(Table(hold(other)))
    assert held_rows(Table(hold(one))) is not None
    assert held_rows(ConcatDataset([Table(hold(one))])) != held_rows(Table([]))


def test_a_chain_of_sets_without_a_length_holds_no_rows() -> None:
    assert held_rows(ChainDataset([Rows(), Rows()])) is None


def test_what_has_no_length_is_no_row() -> None:
    rows = np.arange(float(SAMPLES))
    data, bare = Table(rows), Table(rows)
    vars(data).update(mean=torch.tensor(0.5), scale=np.array(2.0), ragged=torch.nested.nested_tensor([torch.ones(2)]))
    assert held_rows(data) == held_rows(bare)


class Noisy(Images):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.noise = np.random.default_rng(seed).random(SAMPLES)


def with_split(place: Path, attempt: int, seed: int, at: tuple[int, int] | None, noise: int = 1) -> dict[str, Any]:
    return loop(place, attempt, at=at, how="stop", make=lambda: DataLoader(Subset(Noisy(noise), split(seed)), 6))


def test_another_split_at_the_resume_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(with_split, 1, run.path, 0, 1, (1, 2))
    (ended,) = run_ranks(with_split, 1, run.path, 1, 2, None)
    assert ended["status"] == 1
    assert "or are split differently" in failure(run)
    assert told(run) == []
    (ended,) = run_ranks(with_split, 1, run.path, 2, 1, None, 2)
    assert ended["status"] is None
    (message,) = told(run)
    assert "lists in the data set are not what they were when the checkpoint was saved" in message
