"""run.resumable over the sets and streams of Hugging Face's datasets, as its documentation writes them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import loop, new_run
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from train_ranks import preload, run_ranks

from cluster_ddp.train.ranks.distributed import find_world

# Each takes seconds; a worker that hangs is not waited for for five minutes.
pytestmark = [pytest.mark.datasets, pytest.mark.timeout(120)]
SHARDS, ROWS = 8, 12  # of a file


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    preload("datasets", restart=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def write(folder: Path) -> list[str]:
    """A data set in several parquet files."""
    import datasets

    files = [str(folder / f"rows-{shard}.parquet") for shard in range(SHARDS)]
    for shard, file in enumerate(files):
        numbers = range(shard * ROWS, shard * ROWS + ROWS)
        rows = {"x": [[number / 96] * 6 for number in numbers], "label": [number % 3 for number in numbers]}
        datasets.Dataset.from_dict(rows).to_parquet(file)
    return files


def noisy(rows: dict[str, Any]) -> dict[str, Any]:
    """Random augmentation of several rows."""
    return {"x": [torch.tensor(x) + 0.1 * torch.randn(6) + random.random() for x in rows["x"]], "label": rows["label"]}


def mixed(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Makes a batch, with random augmentation."""
    inputs = torch.stack([torch.as_tensor(row["x"], dtype=torch.float32) for row in rows])
    return inputs + 0.1 * torch.randn_like(inputs) + random.random(), torch.tensor([int(row["label"]) for row in rows])


def loader(rows: Any, workers: int, **more: Any) -> DataLoader[Any]:
    """Its workers are forked as those of a rank are, which a fork server does not start."""
    context = "fork" if workers else None
    return DataLoader(rows, 6, num_workers=workers, multiprocessing_context=context, collate_fn=mixed, **more)


def mapped(files: list[str], workers: int) -> DataLoader[Any]:
    """A map-style set, which augments as it is read."""
    import datasets

    rows: Any = datasets.load_dataset("parquet", data_files=files, split="train").with_transform(noisy)
    world = find_world()
    sampler = DistributedSampler(rows, world.world_size, world.rank) if world.world_size > 1 else None
    return loader(rows, workers, shuffle=sampler is None, sampler=sampler)


def streamed(files: list[str], workers: int) -> DataLoader[Any]:
    """A stream that is shuffled by a buffer, by `set_epoch`, and divided among the ranks."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    world = find_world()
    rows = split_dataset_by_node(rows.shuffle(seed=3, buffer_size=20), world.rank, world.world_size)
    return loader(rows, workers)


def augmented(files: list[str], workers: int) -> DataLoader[Any]:
    """A stream that is not shuffled, and augments as it is read."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    world = find_world()
    rows = split_dataset_by_node(rows, world.rank, world.world_size).map(noisy, batched=True, batch_size=4)
    return loader(rows, workers)


def attempt(place: Path, number: int, make: Callable[..., Any], files: list[str], workers: int, *at: Any) -> Any:
    """One attempt of a run; interrupted at `at`, a batch and how."""
    batches = SHARDS * ROWS // 6 // find_world().world_size
    return loop(place, number, "", *at, make=lambda: make(files, workers), batches=batches)


CASES = [
    (mapped, 1, 0),
    (mapped, 2, 2),
    # Each time that a shuffled stream is left in its middle the library waits for 5 s.
    pytest.param(streamed, 1, 0, marks=pytest.mark.chaos),
    pytest.param(streamed, 2, 2, marks=pytest.mark.chaos),
    (augmented, 1, 0),
    (augmented, 2, 2),
]


@pytest.mark.parametrize(("make", "ranks", "workers"), CASES)
def test_sets_and_streams_of_hugging_face_go_on_exactly(
    make: Callable[..., Any], ranks: int, workers: int, tmp_path: Path
) -> None:
    files = write(tmp_path)
    calm, broken = (new_run(tmp_path / name).path for name in ("calm", "broken"))
    whole = run_ranks(attempt, ranks, calm, 0, make, files, workers)
    # Workers of a killed rank may outlive it, and what tells of the rank's end with them.
    with contextlib.suppress(AssertionError):  # of ranks that died
        run_ranks(attempt, ranks, broken, 0, make, files, workers, (0, 5), "crash" if workers else "kill")
    stopped = run_ranks(attempt, ranks, broken, 1, make, files, workers, (1, 3), "stop")
    ended = run_ranks(attempt, ranks, broken, 2, make, files, workers)
    for told, before, after in zip(whole, stopped, ended, strict=True):
        assert before["losses"] + after["losses"] == told["losses"][3:]
        assert before["losses"] and after["losses"] and after["digest"] == told["digest"]
