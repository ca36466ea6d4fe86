"""What a training says at its start, and what it measures of a GPU."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from train_tasks import Plain, attentive, job, new_run, train

from cluster_ddp.run.reading import parse_lines
from cluster_ddp.run.status.report import describe
from cluster_ddp.train import StopSignals, trainer
from cluster_ddp.train.metrics import log
from cluster_ddp.train.metrics.losses import StepLoss
from cluster_ddp.train.ranks import distributed
from cluster_ddp.train.ranks.distributed import World


def test_ranks_batch_and_peak_rate_are_said_at_the_start_and_kept_for_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scaled = {"lr": 0.003, "lr_scaling": "linear", "base_batch": 8}
    sections = {"train": {"steps": 4, "global_batch": 24, "accumulation_steps": 2, **scaled}}
    run = new_run(tmp_path, **sections)
    train(Plain(), job(**sections), run)
    setup = "1 rank, global batch 24 (1 rank x 2 passes x 12 samples), peak lr 0.009"
    assert capfd.readouterr().out.splitlines()[:2] == [setup, f"rank 0: cpu on {platform.node()}"]
    assert describe(run, {}).training == setup


def test_the_ranks_of_a_host_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [("n1", "cpu"), ("n1", "cpu"), ("n2", "cpu")]
    monkeypatch.setattr(distributed, "all_gather_object", lambda mine: places)
    assert distributed.describe_ranks(World(0, 0, 3)) == ["ranks 0, 1: cpu on n1", "rank 2: cpu on n2"]


def test_the_peak_of_gpu_memory_is_a_metric_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training stays on the CPU; only the log believes that it is on a GPU."""
    sections = {"train": {"steps": 3, "global_batch": 24}, "log": {"every_steps": 1}}
    run = new_run(tmp_path, **sections)
    gpu, peaks = torch.device("cuda", 1), iter((3 << 29, 3 << 30, 5 << 30))
    monkeypatch.setattr(trainer, "Log", lambda *given: log.Log(*given[:5], gpu, *given[6:]))
    monkeypatch.setattr(log, "StepLoss", lambda device: StepLoss(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks) if device == gpu else 0)
    trainer.Trainer(job(**sections), Plain(), run, process=attentive(StopSignals())).run()
    rows = [row for row in parse_lines(run.metrics_file.read_bytes()) if "train/loss" in row]
    assert [row["gpu_memory_peak_gib"] for row in rows] == [1.5, 3.0, 5.0]
    assert describe(run, {}).metrics["gpu_memory_peak_gib"] == 5.0


def test_without_a_gpu_no_memory_of_one_is_logged(tmp_path: Path) -> None:
    sections = {"train": {"steps": 2, "global_batch": 24}, "log": {"every_steps": 1}}
    run = new_run(tmp_path, **sections)
    train(Plain(), job(**sections), run)
    assert "gpu_memory_peak_gib" not in describe(run, {}).metrics


def test_an_end_that_was_passed_before_the_resume_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    longer, shorter = ({"train": {"steps": steps, "global_batch": 24}} for steps in (3, 2))
    run = new_run(tmp_path, **longer)
    train(Plain(), job(**longer), run)
    assert "no step is left" not in capfd.readouterr().err
    train(Plain(), job(**shorter), run, 1)
    assert "training ends at step 2 now, and the checkpoint is of step 3: no step is left" in capfd.readouterr().err


def test_another_number_of_threads_than_at_the_save_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each change: the attempt after it is compared with the one that saved last."""
    sections = {"train": {"steps": 6, "global_batch": 24}}
    run = new_run(tmp_path, **sections)
    said = []
    for attempt, (threads, stop_at) in enumerate([(2, 2), (2, 3), (4, 4), (4, None)]):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        train(Plain(), job(**sections), run, attempt, stop_at=stop_at)
        said += [line for line in capfd.readouterr().err.splitlines() if "threads" in line]
    assert len(said) == 1
    assert "torch uses 4 threads, but used 2 when the checkpoint was saved: the last bits" in said[0]
    assert any("torch uses 4 threads" in warning for warning in describe(run, {}).warnings)


def test_another_version_of_torch_than_at_the_save_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"train": {"steps": 6, "global_batch": 24}}
    run = new_run(tmp_path, **sections)
    train(Plain(), job(**sections), run, stop_at=2)
    train(Plain(), job(**sections), run, 1, stop_at=4)
    assert "torch is version" not in capfd.readouterr().err
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    train(Plain(), job(**sections), run, 2)
    assert "torch is version 9.0.0, but was 2." in capfd.readouterr().err


class WithEpochs(Plain):
    """Its data set waits to be told the epoch, as some do that are made for torch's samplers."""

    def train_data(self) -> Any:
        data: Any = super().train_data()
        data.set_epoch = print
        return data


def test_a_map_style_set_that_waits_for_its_epoch_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sections = {"train": {"steps": 2, "global_batch": 24}}
    train(WithEpochs(), job(**sections), new_run(tmp_path, **sections))
    assert "set_epoch() of the training set (TensorDataset) is never called" in capfd.readouterr().err
