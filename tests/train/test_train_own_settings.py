"""What the job file sets for every training holds in a custom loop, too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_loops import LOADERS, begin_attempt, failure, model_of, told
from torch.nn import functional as F
from train_ranks import run_ranks

from cluster_ddp.job import CheckpointSpec, JobSpec, LogSpec, NetworkSpec
from cluster_ddp.job.models import KeepBestSpec, WandbSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import read_record
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import join_run

ACCURACIES = (0.3, 0.9, 0.5, 0.6)


def new_run(folder: Path, **sections: Any) -> RunDirectory:
    job = JobSpec(name="own", script="own.py", **sections)
    return create_run(job, runs_dir=folder, via="local", script=None)


def validated(place: Path) -> None:
    """A loop that validates after each epoch of 8 steps, and logs that."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = run.resumable(LOADERS["shuffled"](), model=model, optimizer=optimizer, epochs=len(ACCURACIES))
        for epoch in loader.epochs():
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            run.log(run.step, {"val/accuracy": torch.tensor([ACCURACIES[epoch]])})


def test_the_best_checkpoint_of_a_loop_is_kept_and_its_metrics_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    best = KeepBestSpec(metric="val/accuracy")
    checkpoint = CheckpointSpec(every_steps=1000, keep_last=1, keep_best=best, background=False)
    log = LogSpec(tensorboard=True, wandb=WandbSpec(mode="offline"))
    run = new_run(tmp_path, checkpoint=checkpoint, log=log)
    run_ranks(validated, 1, run.path)
    kept = sorted(path.name for path in run.checkpoints.glob("step-*"))
    assert kept == ["step-00000016", "step-00000032"]  # of the second epoch, and the last
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("val/accuracy")]
    assert shown == [(8 * epoch, pytest.approx(value)) for epoch, value in enumerate(ACCURACIES, start=1)]
    wandb_id = read_record(run).wandb_id
    assert [path.name for path in run.path.rglob("*.wandb")] == [f"run-{wandb_id}.wandb"]


def test_a_metric_that_is_never_logged_is_told_of(tmp_path: Path) -> None:
    checkpoint = CheckpointSpec(every_steps=1000, keep_best=KeepBestSpec(metric="val/acuracy"))
    run = new_run(tmp_path, checkpoint=checkpoint)
    run_ranks(validated, 1, run.path)
    (warning,) = told(run)
    assert "val/acuracy was not logged" in warning and "run.log() was given val/accuracy" in warning


def late(place: Path) -> float:
    """One rank comes late to what the ranks do together, in a group that the program has made itself."""
    begin_attempt(place, 0)
    assert dist.is_initialized()  # with the default of half an hour
    began = time.monotonic()
    try:
        with join_run():
            if os.environ["RANK"] == "1":
                time.sleep(8)
            dist.barrier()
    except SystemExit:
        pass
    return time.monotonic() - began


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="the Gloo of older torch keeps its first timeout")
def test_the_timeout_holds_in_a_group_that_the_program_has_made(tmp_path: Path) -> None:
    run = new_run(tmp_path, network=NetworkSpec(timeout=2))
    waited, _ = run_ranks(late, 2, run.path)
    assert waited < 7
    assert "imed out" in failure(run)
