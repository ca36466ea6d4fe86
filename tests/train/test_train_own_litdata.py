"""run.resumable over a StreamingDataset of litData in a DataLoader, shuffled and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import SAMPLES, loop, new_run
from torch.utils.data import DataLoader
from train_ranks import preload, run_ranks

pytestmark = pytest.mark.datasets


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    preload("litdata", restart=True)
    monkeypatch.setenv("DATA_OPTIMIZER_CACHE_FOLDER", str(tmp_path / "cache"))


def write(folder: str) -> None:
    """A data set in several chunks."""
    from litdata.streaming.cache import Cache

    cache = Cache(folder, chunk_size=6)
    for number in range(SAMPLES):
        cache[number] = {"x": torch.full((6,), number / SAMPLES), "label": number % 3}
    cache.done()
    cache.merge()


def make(folder: str, shuffle: bool, workers: int) -> DataLoader[Any]:
    """As its page says for PyTorch's DataLoader."""
    from litdata import StreamingDataset

    def mixed(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
        inputs = torch.stack([row["x"] for row in rows])
        return inputs + 0.1 * torch.randn_like(inputs), torch.tensor([row["label"] for row in rows])

    rows = StreamingDataset(folder, shuffle=shuffle)
    context = "fork" if workers else None
    return DataLoader(rows, 4, num_workers=workers, multiprocessing_context=context, collate_fn=mixed)


def story(folder: Path, shuffle: bool, workers: int) -> list[Any]:
    """A run that is left alone, and one that is stopped, fails, and goes on."""
    data = str(folder / "data")
    calm, broken = (new_run(folder / name).path for name in ("calm", "broken"))
    told: dict[str, Any] = {"make": lambda: make(data, shuffle, workers)}
    whole = loop(calm, 0, **told)
    loop(broken, 0, at=(0, 4), how="crash", **told)
    loop(broken, 1, at=(1, 2), **told)
    ended = loop(broken, 2, **told)
    return [(whole["status"], whole["digest"]), (ended["status"], ended["digest"])]


@pytest.mark.parametrize(("shuffle", "workers"), [(True, 0), (False, 2)])
def test_a_streaming_dataset_goes_on_exactly(shuffle: bool, workers: int, tmp_path: Path) -> None:
    run_ranks(write, 1, str(tmp_path / "data"))
    ((whole, ended),) = run_ranks(story, 1, tmp_path, shuffle, workers)
    assert whole == ended
    assert whole[0] is None
