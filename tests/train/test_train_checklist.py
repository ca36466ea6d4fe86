"""Guide 1's checklist: one process, two ranks, rank 0 alone writes and prints, and the weights serve one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_batches import Doubles
from torch.nn import functional as F
from train_ranks import run_ranks
from train_tasks import Plain, job, losses, new_run, samples, train

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.run.storage import Storage
from cluster_ddp.train import broadcast_object, is_main_process

STEPS = 12
SECTIONS: dict[str, Any] = {
    "train": {"steps": STEPS, "global_batch": 24, "lr": 0.01, "evaluate_every": "end"},
    "log": {"every_steps": 1},
}
RANKS_OF_TORCHRUN = 2


class Trained:
    """A run that `python -m cluster_ddp.train` has completed, and what each rank printed."""

    def __init__(self, folder: Path, launcher: list[str]) -> None:
        self.run: RunDirectory = new_run(folder, **SECTIONS)
        self.run.attempt(0).path.mkdir()
        of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        self.process = subprocess.run(
            [sys.executable, "-m", *launcher, "cluster_ddp.train", str(self.run.path)],
            env={name: value for name, value in os.environ.items() if name not in of_ranks},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert self.process.returncode == 0, self.process.stderr
        rows = parse_lines(self.run.metrics_file.read_bytes())
        self.evaluation = next(row for row in rows if "val/accuracy" in row)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("alone"), [])


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trained, Path]]:
    folder = tmp_path_factory.mktemp("torchrun")
    logs = folder / "logs"
    options = ["--standalone", f"--nproc-per-node={RANKS_OF_TORCHRUN}", "--redirects=3", f"--log-dir={logs}"]
    yield Trained(folder, ["torch.distributed.run", *options, "-m"]), logs


def test_a_single_process_still_trains(alone: Trained) -> None:
    assert [step for step, _ in losses(alone.run)] == list(range(1, STEPS + 1))
    assert f"step {STEPS}/{STEPS}" in alone.process.stdout


def test_torchrun_trains_and_only_rank_0_prints(by_torchrun: tuple[Trained, Path]) -> None:
    trained, logs = by_torchrun
    assert [step for step, _ in losses(trained.run)] == list(range(1, STEPS + 1))
    printed = {file.parent.name: file.read_text() for file in logs.rglob("stdout.log")}
    assert len(printed) == RANKS_OF_TORCHRUN
    assert f"step {STEPS}/{STEPS}" in printed["0"] and printed["1"] == ""


def test_the_numbers_are_those_of_a_single_process(alone: Trained, by_torchrun: tuple[Trained, Path]) -> None:
    trained, _ = by_torchrun
    assert trained.evaluation["val/accuracy"] == alone.evaluation["val/accuracy"]
    assert trained.evaluation["val/loss"] == pytest.approx(alone.evaluation["val/loss"], rel=1e-5)
    for (_, alone_loss), (_, other) in zip(losses(alone.run), losses(trained.run), strict=True):
        assert alone_loss == pytest.approx(other, rel=1e-5)


def test_weights_of_two_ranks_serve_a_single_process(by_torchrun: tuple[Trained, Path], tmp_path: Path) -> None:
    trained, _ = by_torchrun
    weights = tmp_path / "model.safetensors"
    command = [sys.executable, "-m", "cluster_ddp", "export", str(trained.run.path), "-o", str(weights)]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    model = Plain().model().eval()
    model.load_state_dict(load_file(weights))
    inputs, labels = samples(23, seed=6)
    with torch.no_grad():
        scores = model(inputs)
    assert (scores.argmax(1) == labels).double().mean().item() == pytest.approx(trained.evaluation["val/accuracy"])
    assert F.cross_entropy(scores, labels).item() == pytest.approx(trained.evaluation["val/loss"], rel=1e-5)


def files_written(folder: Path, ranks_writing: str) -> list[str]:
    """Train with checkpoints; the files that this rank has written into them."""
    opened: list[str] = []
    open_write = Storage.open_write

    def noting(self: Storage, path: Path, mode: int = 0o644) -> int:
        opened.append(str(path))
        return open_write(self, path, mode)

    Storage.open_write = noting  # type: ignore[method-assign]  # in a process of its own
    sections = {**SECTIONS, "checkpoint": {"ranks_writing": ranks_writing}}
    run = broadcast_object(new_run(folder, **sections) if is_main_process() else None)
    assert run is not None
    train(Plain(), job(**sections), run)
    return [Path(path).name for path in opened if path.startswith(str(run.checkpoints))]


def test_only_rank_0_completes_a_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(files_written, 2, tmp_path, "all")
    assert any("manifest" in name for name in first)
    assert second and not any("manifest" in name for name in second)


def test_only_rank_0_writes_where_one_rank_is_to_write(tmp_path: Path) -> None:
    first, second = run_ranks(files_written, 2, tmp_path, "one")
    assert len(first) >= 2 and second == []


def accuracy() -> tuple[float, int]:
    """Of one evaluation with weights that are equal on any number of ranks; and the samples that this rank has seen."""
    seen = 0

    class Counting(Doubles):
        def evaluate(self, model: Any, batch: Any) -> Any:
            nonlocal seen
            seen += len(batch[1])
            return super().evaluate(model, batch)

    _, outcome = train(Counting(), job(train={**SECTIONS["train"], "steps": 2}))
    return outcome.metrics["val/accuracy"], seen


def test_accuracy_is_equal_on_1_to_4_ranks() -> None:
    """The set has 23 samples: no number of ranks divides it, and each sample is seen once."""
    accuracies = set()
    for world_size in (1, 2, 3, 4):
        found = run_ranks(accuracy, world_size)
        assert sum(seen for _, seen in found) == 23
        accuracies |= {value for value, _ in found}
    assert len(accuracies) == 1 and 0.0 < accuracies.pop() < 1.0
