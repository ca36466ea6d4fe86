"""Learning rates, and which parameters decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from train_tasks import job

from cluster_ddp.job import TrainSpec, scaled_lr
from cluster_ddp.train.optimizer import adamw
from cluster_ddp.train.schedule import Schedule


def spec(**train: Any) -> TrainSpec:
    return job(train=train).train


def schedule(peak: float = 1.0, total: int = 110, **train: Any) -> Schedule:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    return Schedule(spec(lr=peak, **train), optimizer, peak=peak, total=total, warn=pytest.fail)


def test_shapes() -> None:
    assert [schedule(warmup_steps=4).lr(update) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = schedule(warmup_steps=10, schedule="cosine", min_lr=0.2)
    assert cosine.lr(10) == 1.0 and cosine.lr(60) == pytest.approx(0.6) and cosine.lr(110) == pytest.approx(0.2)
    assert cosine.lr(35) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    linear = schedule(warmup_steps=10, schedule="linear", min_lr=0.5)
    assert linear.lr(60) == pytest.approx(0.75) and linear.lr(500) == pytest.approx(0.5)
    steps = schedule(schedule="step", decay_every=30, decay_factor=0.5)
    assert [steps.lr(update) for update in (0, 29, 30, 60, 90)] == [1.0, 1.0, 0.5, 0.25, 0.125]
    thirds = schedule(schedule="step", total=90)
    assert [thirds.lr(update) for update in (29, 30, 60)] == pytest.approx([1.0, 0.1, 0.01])


def test_groups_keep_their_proportion() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 0.4}, {"params": parameters[1:], "lr": 0.04}])
    Schedule(spec(lr=0.4, schedule="linear"), optimizer, peak=0.4, total=100, warn=pytest.fail).apply(50)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])


def test_scaling_by_the_global_batch() -> None:
    assert scaled_lr(spec(lr=0.1), 1024) == 0.1
    assert scaled_lr(spec(lr=0.1, lr_scaling="linear", base_batch=256), 1024) == pytest.approx(0.4)
    assert scaled_lr(spec(lr=0.1, lr_scaling="sqrt", base_batch=256), 1024) == pytest.approx(0.2)


def test_norms_and_biases_do_not_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.LayerNorm((4, 4)))
    model[2].weight.requires_grad_(False)
    optimizer = adamw(model, lr=0.1, weight_decay=0.3)
    decaying, others = optimizer.param_groups
    assert [id(parameter) for parameter in decaying["params"]] == [id(model[0].weight)]
    assert decaying["weight_decay"] == 0.3 and others["weight_decay"] == 0.0
    # LayerNorm over two dimensions has a gain with two, which is no weight all the same.
    assert {id(p) for p in others["params"]} == {
        id(p) for p in (model[0].bias, model[1].weight, model[1].bias, model[2].bias, model[3].weight, model[3].bias)
    }
    assert optimizer.defaults["fused"]
