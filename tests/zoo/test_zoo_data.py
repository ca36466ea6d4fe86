"""Data sets that cannot be resumed exactly are refused at once, by name; those of real libraries are exact."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info
from train_ranks import run_ranks
from zoo_data import DATA, REFUSED_DATA, Augmented, Stream, samples
from zoo_hf import HF_DATA
from zoo_training import Case, ZooTask, judge

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.ranks.distributed import find_world


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", REFUSED_DATA)
def test_what_cannot_be_exact_is_refused_before_the_first_step(data: str, workers: int, tmp_path: Path) -> None:
    verdict = judge(Case(data=data, train={"workers": workers}), tmp_path)
    assert verdict.refused is not None and verdict.refused_at in (-1, 0)
    assert type(REFUSED_DATA[data]()).__name__ in verdict.refused and "no resume could be exact" in verdict.refused
    assert ("in its own threads" in verdict.refused) == (data == "random numbers in a thread")
    assert "Traceback" not in verdict.refused


class OfWorker(Augmented):
    """Its samples depend on the worker that reads them, by its id or by its seed."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + getattr(get_worker_info(), self.what) % 99, label


@pytest.mark.parametrize("what", ["id", "seed"])
def test_samples_that_depend_on_their_worker_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATA, "of worker", partial(OfWorker, what))
    verdict = judge(Case(data="of worker", train={"workers": 2}), tmp_path)
    assert "gives different samples in a different worker" in (verdict.refused or "") and verdict.refused_at == 0, (
        verdict
    )


PROGRAM = """
import sys, warnings
from pathlib import Path
from zoo_data import DATA
from zoo_hf import HF_DATA, augmented_row, hf_streaming
from zoo_training import Case, judge

warnings.simplefilter("ignore")
DATA.update(HF_DATA)
DATA["augmented"] = lambda: hf_streaming(augmented_row)
for number, name in enumerate([*HF_DATA, "augmented"]):
    case = Case(data=name, train={"workers": int(sys.argv[2])})
    print("VERDICT", name, judge(case, Path(sys.argv[1]) / str(number)), sep="|", flush=True)
"""


@pytest.mark.datasets
@pytest.mark.parametrize("workers", [0, 2])
def test_sets_of_hugging_face_are_exact(workers: int, tmp_path: Path) -> None:
    """In a process of its own, whose workers are forked as those of a rank are."""
    pytest.importorskip("datasets")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    lines = [line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("VERDICT|")]
    *rest, (_, refused) = lines
    assert refused.startswith("refused after step 0: ") and "in its own threads" in refused
    assert rest == [[name, "exact"] for name in HF_DATA], done.stdout[-1000:] + done.stderr[-2000:]


def dealt(items: Iterator[Any], rank: int, ranks: int) -> Iterator[Any]:
    """The part of one rank."""
    return (item for position, item in enumerate(items) if position % ranks == rank)


class Part(Stream):
    """Reads the part of this rank only; the parts are not of the same length."""

    def __iter__(self) -> Iterator[Any]:
        world = find_world()
        return dealt(super().__iter__(), world.rank, world.world_size)


class Sharded(ZooTask):
    """Says so."""

    sharded = True


def judge_parts(folder: Path) -> list[str]:
    DATA["part"] = Part
    case = Case(data="part", train={"global_batch": 12})
    return [str(judge(case, folder / "refused")), str(judge(case, folder / "exact", Sharded))]


def test_parts_by_rank_are_exact_where_the_task_says_so_and_else_refused(tmp_path: Path) -> None:
    for refused, exact in run_ranks(judge_parts, 3, tmp_path):
        assert refused.startswith("refused after step 0: the ranks read different items")
        assert exact == "exact"


def test_an_item_of_one_element_has_a_fingerprint_whatever_its_stride() -> None:
    assert fingerprint(torch.ones(4)[::4]) == fingerprint(torch.ones(1))


class Longer(Augmented):
    """Its length is another on each rank."""

    def __len__(self) -> int:
        return 40 + find_world().rank


def judge_lengths(folder: Path) -> str:
    DATA["longer"] = Longer
    return str(judge(Case(data="longer"), folder))


def test_a_length_of_each_rank_is_refused(tmp_path: Path) -> None:
    for verdict in run_ranks(judge_lengths, 2, tmp_path):
        assert verdict.startswith(
            "refused after step -1: train_data() has a different length on each rank (40, 41, by rank)"
        )


class Shrinks(ZooTask):
    """Has another data set after the first crash."""

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*samples(44 if self.crash in (None, 4) else 41))


def test_a_data_set_that_changed_between_attempts_is_seen(tmp_path: Path) -> None:
    verdict = judge(Case(data="tensors"), tmp_path, Shrinks)
    assert verdict.refused is not None and "has 41 items; it had 44" in verdict.refused


class Replaced(ZooTask):
    """Has other samples, as many, after the first crash."""

    def train_data(self) -> Dataset[Any]:
        inputs, labels = samples()
        return TensorDataset(inputs if self.crash in (None, 4) else inputs.flip(0), labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_others_after_a_resume_are_told(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(Case(data="augmented", train={"workers": workers}), tmp_path / "same")
    assert "train_data()" not in capfd.readouterr().err
    judge(Case(data="tensors", train={"workers": workers}), tmp_path / "others", Replaced)
    assert "a sample of train_data() has changed since the checkpoint was saved" in capfd.readouterr().err


class Unsorted(Augmented):
    """Each rank finds its samples in another order."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index - find_world().rank)


def say_of_orders(folder: Path) -> str:
    DATA["unsorted"] = Unsorted
    with contextlib.redirect_stderr(io.StringIO()) as said:
        judge(Case(data="unsorted"), folder)
    return said.getvalue()


def test_samples_that_differ_by_rank_are_told(tmp_path: Path) -> None:
    said, other = run_ranks(say_of_orders, 2, tmp_path)
    assert "train_data() is not the same on rank 0 on" in said and "and on rank 1 on" in said
    assert "train_data()" not in other
