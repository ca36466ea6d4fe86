"""A resume on a different number of ranks loses nothing without a word."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Plain, job, new_run, train

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train import all_gather_object

SECTIONS = {"train": {"steps": 4, "global_batch": 12}, "checkpoint": {"background": False}}


class KeepsByRank(Plain):
    """Its state has a mean of each rank; a resume takes that of this rank, and a count that all ranks share."""

    def __init__(self) -> None:
        self.mean, self.steps = 0.0, 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.mean, self.steps = 0.9 * self.mean + float(batch[0].mean()), self.steps + 1
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"means": all_gather_object(self.mean), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.mean, self.steps = state["means"][int(os.environ.get("RANK", 0))], state["steps"]


def stop_after_two_steps(path: Path) -> None:
    train(KeepsByRank(), job(**SECTIONS), RunDirectory(path), stop_at=2)


def test_what_ranks_that_are_no_longer_there_have_kept_is_reported_as_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path, **SECTIONS)
    run_ranks(stop_after_two_steps, 2, run.path)
    capfd.readouterr()
    train(KeepsByRank(), job(**SECTIONS), run, 1)
    [said] = [line for line in capfd.readouterr().err.splitlines() if "on a different number of ranks" in line]
    assert "task.means: " in said and "task.steps" not in said
