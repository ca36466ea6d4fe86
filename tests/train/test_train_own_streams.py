"""run.resumable over streams: those of libraries as their documentation writes them, and those that cannot be exact."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from own_loops import SAMPLES, Rows, failure, loop, mixed, new_run, told
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from train_ranks import run_ranks

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.data.batches import batches_of

Row = tuple[Tensor, int]
BATCHES = 4  # of an epoch, however the shards are divided among ranks and workers


class CountsPasses(Rows):
    """Its order is another in each pass."""

    passes = 0

    def __iter__(self) -> Iterator[Row]:
        self.passes += 1
        rows = list(super().__iter__())
        random.Random(self.passes).shuffle(rows)
        yield from rows


class TimeShuffled(Rows):
    """Shuffles by a generator that the system seeds, as WebDataset's shuffle does."""

    def __iter__(self) -> Iterator[Row]:
        rows = list(super().__iter__())
        random.Random().shuffle(rows)
        yield from rows


class InThreads(Rows):
    """Draws its random numbers in a thread."""

    def __iter__(self) -> Iterator[Row]:
        rows: list[Row] = []
        done = threading.Event()

        def read() -> None:
            rows.extend(super(InThreads, self).__iter__())
            done.wait()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        while len(rows) < SAMPLES // 2:
            pass
        yield from list(rows)
        done.set()


class Together(Rows):
    """Starts a thread; reads slower on each further rank, of which the stream of a library may wait for all."""

    passes = 0

    def __iter__(self) -> Iterator[Row]:
        if not self.passes:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        self.passes += 1
        time.sleep(0.2 * dist.get_rank())
        yield from super().__iter__()


class ReadAhead(IterableDataset[Row]):
    """Reads in a thread, and draws nothing."""

    def __iter__(self) -> Iterator[Row]:
        done = threading.Event()
        threading.Thread(target=done.wait, daemon=True).start()
        yield from ((torch.full((6,), index / SAMPLES), index % 3) for index in range(SAMPLES))
        done.set()


class ShufflesAhead(IterableDataset[Row]):
    """Reads in a thread, in an order that follows from a generator of its own, as a stream of `datasets` does."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Row]:
        order = copy.deepcopy(self.generator).permutation(SAMPLES)
        done = threading.Event()
        threading.Thread(target=done.wait, daemon=True).start()
        yield from ((torch.full((6,), index / SAMPLES), int(index) % 3) for index in order)
        done.set()


class Slanted(Rows):
    """Is made with another seed in each attempt."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Row]:
        for inputs, label in super().__iter__():
            yield inputs + self.seed, label


def refused(place: Path, kind: type[Rows], workers: int) -> dict[str, Any]:
    return loop(place, 0, make=lambda: DataLoader(kind(), batch_size=6, num_workers=workers), batches=BATCHES)


@pytest.mark.parametrize(
    ("kind", "workers", "words"),
    [
        (CountsPasses, 0, "the CountsPasses gives different items when the same epoch is read again"),
        (TimeShuffled, 2, "the TimeShuffled gives different items when the same epoch is read again"),
        (InThreads, 0, "the InThreads reads in its own threads, and draws random numbers there"),
        (InThreads, 1, "the InThreads reads in its own threads, and draws random numbers there"),
    ],
)
def test_a_stream_that_cannot_be_exact_is_refused_at_once(
    kind: type[Rows], workers: int, words: str, tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    (told,) = run_ranks(refused, 1, run.path, kind, workers)
    assert (told["status"], told["losses"]) == (1, [])
    assert words in failure(run)


def drawing(place: Path) -> dict[str, Any]:
    make = lambda: DataLoader(ReadAhead(), batch_size=6, collate_fn=mixed)  # noqa: E731
    return loop(place, 0, make=make, batches=BATCHES, epochs=1)


def test_a_stream_read_in_threads_may_draw_in_collate_fn(tmp_path: Path) -> None:
    (told,) = run_ranks(drawing, 1, new_run(tmp_path).path)
    assert len(told["losses"]) == BATCHES


def ordering(place: Path) -> list[dict[str, Any]]:
    """In one go, and with a stop and a resume."""
    places = [(place / "calm", [()]), (place / "broken", [((1, 1), "stop"), ()])]
    make = lambda: DataLoader(ShufflesAhead(), batch_size=6)  # noqa: E731
    found = []
    for folder, attempts in places:
        folder.mkdir()
        run = new_run(folder).path
        found += [loop(run, number, "", *at, make=make, batches=BATCHES) for number, at in enumerate(attempts)]
    return found


def test_a_generator_of_the_streams_own_is_seeded_though_it_reads_in_threads(tmp_path: Path) -> None:
    ((whole, stopped, ended),) = run_ranks(ordering, 1, tmp_path)
    assert stopped["losses"] and stopped["losses"] + ended["losses"] == whole["losses"]


def changed(place: Path) -> list[dict[str, Any]]:
    """A resume with other items."""
    makes = [lambda seed=seed: DataLoader(Slanted(seed), batch_size=6) for seed in (1, 2)]
    first = loop(place, 0, at=(1, 1), make=makes[0], batches=BATCHES)
    return [first, loop(place, 1, make=makes[1], batches=BATCHES)]


def test_a_stream_that_begins_otherwise_than_before_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ((first, second),) = run_ranks(changed, 1, run.path)
    assert first["losses"] and not second["losses"]
    assert "the data do not begin with the same items as when the checkpoint was saved" in failure(run)


def undivided(place: Path) -> None:
    """A set that no rank divides."""
    loop(place, 0, make=lambda: DataLoader(Rows(), batch_size=6), batches=BATCHES, epochs=1)


def test_ranks_that_read_the_same_items_are_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(undivided, 2, run.path)
    (message,) = told(run)
    assert "all ranks read the same items from the Rows, so each rank trains on all of them" in message


def passes(place: Path) -> int:
    data = Together()
    loop(place, 0, make=lambda: DataLoader(data, batch_size=6), batches=2, epochs=1)
    return data.passes


def test_all_ranks_read_equally_often(tmp_path: Path) -> None:
    first, second = run_ranks(passes, 2, new_run(tmp_path).path)
    assert first == second > 4


def test_a_webloader_is_refused_with_what_to_give() -> None:
    wds = pytest.importorskip("webdataset")
    with pytest.raises(
        TrainError, match=r"takes a torch\.utils\.data\.DataLoader, not WebLoader: make one of the data set"
    ):
        batches_of(wds.WebLoader(wds.WebDataset("rows.tar", shardshuffle=False)), 1, BATCHES)


def write_shards(folder: Path) -> str:
    """Eight tar files for WebDataset."""
    import webdataset

    for shard in range(8):
        with webdataset.TarWriter(str(folder / f"rows-{shard:03}.tar")) as tar:
            for index in range(shard * 12, shard * 12 + 12):
                row = np.full(6, index / 96, np.float32)
                tar.write({"__key__": f"{index:04}", "x.npy": row, "y.cls": index % 3})
    return str(folder / "rows-{000..007}.tar")


def noisy(row: Any) -> Any:
    return row + np.float32(random.random())


def as_it_is(label: int) -> int:
    return label


class Shuffled(IterableDataset[Any]):
    """What docs/own-code.md gives for WebDataset with a shuffle."""

    epoch = 0

    def __init__(self, urls: str) -> None:
        self.urls = urls

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        import webdataset as wds

        return iter(
            wds.DataPipeline(
                wds.SimpleShardList(self.urls),
                wds.detshuffle(100, epoch=self.epoch),
                wds.split_by_node,
                wds.split_by_worker,
                wds.tarfile_to_samples(),
                wds.detshuffle(20, epoch=self.epoch),
                wds.decode(),
                wds.to_tuple("x.npy", "y.cls"),
                wds.map_tuple(noisy, as_it_is),
            )
        )


def web_in_order(urls: str) -> Any:
    """The shards of each rank and worker in their order."""
    import webdataset as wds

    data = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node)
    return data.decode().to_tuple("x.npy", "y.cls").map_tuple(noisy, as_it_is)


def attempt(place: Path, number: int, urls: str, make_data: Callable[[str], Any], workers: int, *at: Any) -> Any:
    """One attempt of a run; interrupted at `at`, a batch and how."""

    def make() -> DataLoader[Any]:
        return DataLoader(make_data(urls), batch_size=6, num_workers=workers)

    return loop(place, number, "", *at, make=make, batches=BATCHES)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), pytest.param(2, 2, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("make_data", [web_in_order, Shuffled])
def test_webdataset_goes_on_exactly(make_data: Callable[[str], Any], ranks: int, workers: int, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    urls = write_shards(tmp_path)
    run = new_run(tmp_path / "broken")
    calm, broken = new_run(tmp_path / "calm").path, run.path
    data = (urls, make_data, workers)
    whole = run_ranks(attempt, ranks, calm, 0, *data)
    interruptions: list[tuple[Any, ...]] = [((1, 1), "crash" if ranks == 1 else "stop"), ((2, 1), "stop"), ()]
    attempts = [run_ranks(attempt, ranks, broken, number, *data, *at) for number, at in enumerate(interruptions)]
    for expected, *parts in zip(whole, *attempts, strict=True):
        assert len(parts[-1]["losses"]) < len(expected["losses"]) / 2
        losses = sorted({row for part in parts for row in part["losses"]})
        assert losses == sorted(expected["losses"])
        assert parts[-1]["digest"] == expected["digest"]
    assert told(run) == []
