"""A save goes on during the next step only where that step leaves the weights alone until its update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Plain, job, train

from cluster_ddp.checkpoint.replicas import ReplicaDigest
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import broadcast_object, is_main_process


class Clipping(Plain):
    """Clips its weights before it uses them, as for a Wasserstein distance."""

    def model(self) -> nn.Module:
        self.net = super().model()
        return self.net

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        for weight in self.net.parameters():
            weight.data.clamp_(-0.1, 0.1)
        return super().loss(model, batch)


class Late(ReplicaDigest):
    """Is computed late on rank 1, as by a slower processor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)

    def take(self) -> None:
        if not is_main_process():
            time.sleep(0.2)
        super().take()


def trained(folder: Path) -> tuple[bool, bool]:
    sections = {"train": {"steps": 5, "global_batch": 24}, "checkpoint": {"every_steps": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster_ddp.checkpoint.checkpointer.ReplicaDigest", Late)
        allowed = []
        for task in (Clipping(), Plain()):
            spec = job(**sections)
            made = create_run(spec, runs_dir=folder, via="local", script=None) if is_main_process() else None
            trainer, outcome = train(task, spec, broadcast_object(made))
            assert outcome.completed
            allowed.append(trainer.overlap.is_allowed)
    return allowed[0], allowed[1]


def test_weights_that_the_loss_changes_are_saved_before_it_does(tmp_path: Path) -> None:
    assert run_ranks(trained, 2, tmp_path) == [(False, True)] * 2
