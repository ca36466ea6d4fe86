"""A save goes on during the next step only where that step leaves the weights alone until its update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Plain, job, train

from cluster_ddp.checkpoint.replicas import ReplicaDigest
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import broadcast_object, is_main_process
from cluster_ddp.train.overlap import Overlap


class ClippingLater(Plain):
    """From its third step on, clips its weights before it uses them, as for a Wasserstein distance."""

    def __init__(self) -> None:
        self.calls = 0

    def model(self) -> nn.Module:
        self.net = super().model()
        return self.net

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls > 3:  # the first only settles the buckets of DDP
            for weight in self.net.parameters():
                weight.data.clamp_(-0.1, 0.1)
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


class Late(ReplicaDigest):
    """Is computed late on rank 1, as by a slower processor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)

    def compute(self) -> None:
        if not is_main_process():
            time.sleep(0.2)
        super().compute()


def trained(folder: Path) -> bool:
    sections = {"train": {"steps": 5, "global_batch": 24}, "checkpoint": {"every_steps": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster_ddp.checkpoint.checkpointer.ReplicaDigest", Late)
        spec = job(**sections)
        made = create_run(spec, runs_dir=folder, via="local", script=None) if is_main_process() else None
        _, outcome = train(ClippingLater(), spec, broadcast_object(made))
    return outcome.completed


def test_weights_that_the_loss_changes_are_compared_before_it_does(tmp_path: Path) -> None:
    assert run_ranks(trained, 2, tmp_path) == [True] * 2


@pytest.mark.parametrize("clips", [False, True])
def test_weights_that_the_loss_changes_are_copied_from_a_gpu_before_it_does(clips: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    overlap = Overlap(torch.optim.SGD([weight], lr=0.1), torch.device("cuda"))
    for _ in range(2):
        assert not overlap.is_allowed
        overlap.begin()
        if clips:
            weight.data.clamp_(-0.1, 0.1)
        overlap.end()
    assert overlap.is_allowed == (not clips)
