"""What is no number never gets into the weights, and never into a checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Exploding, Plain, final_state, job, losses, new_run, train

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.lines import read_json_lines
from cluster_ddp.train import NonFiniteError, TaskError, Trainer, stop
from cluster_ddp.train.optimizer import start_momentum
from cluster_ddp.train.update import Update


def bad_steps(steps: tuple[int, ...], most: int) -> tuple[str, int, bool]:
    task = Exploding(*steps, rank=1)
    # Two throw-away passes come before the first step; each step is one call.
    task.steps = tuple(step + 2 for step in steps)
    spec = job(train={"steps": 9, "global_batch": 24, "max_bad_steps": most})
    try:
        trainer, _ = train(task, spec)
    except NonFiniteError as error:
        return str(error), -1, True
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    return "", trainer.update.skipped, finite


def test_an_update_that_is_no_number_is_left_out_on_all_ranks() -> None:
    assert run_ranks(bad_steps, 3, (2, 5), 2) == [("", 2, True)] * 3


def test_a_fused_sgd_begins_without_momentum_when_its_first_update_is_left_out() -> None:
    """It takes memory as it finds it for the momentum of the first update."""

    def train(gradients: list[float], *, fused: bool) -> Tensor:
        parameter = nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        update = Update(optimizer, [parameter], clip_norm=None, scaler=scaler)
        for gradient in gradients:
            torch.full((1000,), 1e30)  # what it may find
            scaler.scale((parameter * gradient).sum()).backward()  # type: ignore[no-untyped-call]
            update.apply()
        return parameter.detach()

    found = train([float("inf"), 1.0, 2.0], fused=True)
    torch.testing.assert_close(found, train([1.0, 2.0], fused=False))
    dampened = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    with pytest.raises(TaskError, match="fused=False"):
        start_momentum(dampened)


def test_too_many_bad_updates_name_the_step_and_the_rank() -> None:
    messages = {message for message, *_ in run_ranks(bad_steps, 3, (2, 3, 4, 5, 6, 7, 8), 3)}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("step 5: 3 updates in a row") and "rank 1 (loss inf)" in message
    assert "rank 0" not in message and "train.max_bad_steps" in message


def test_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 9, "global_batch": 24, "max_bad_steps": 2},
        "checkpoint": {"every_steps": 2},
    }
    run = new_run(tmp_path, **sections)
    with pytest.raises(NonFiniteError):
        train(Exploding(*range(5, 9)), job(**sections), run)
    trainer, outcome = train(Plain(), job(**sections), run, attempt=1)
    assert outcome.completed and all(bool(torch.isfinite(value).all()) for value in final_state(trainer).values())


def test_the_losses_before_a_failure_are_in_the_metrics(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 9, "global_batch": 24, "max_bad_steps": 2},
        "log": {"every_steps": 1},
    }
    run = new_run(tmp_path, **sections)
    with pytest.raises(NonFiniteError):
        train(Exploding(*range(5, 9)), job(**sections), run)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6, 7]


LOGGED: dict[str, Any] = {
    "train": {"steps": 300, "global_batch": 24, "max_bad_steps": 2, "evaluate_every": "end"},
    "log": {"every_steps": 1},
}


class Raising(Exploding):
    """Raises where `Exploding` explodes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.calls - 1 in self.steps and int(os.environ["RANK"]) == self.rank:
            raise RuntimeError("this rank has had enough")
        return super().loss(model, batch)


def failing(kind: type[Exploding], run: RunDirectory) -> str:
    stop._MOST_STEPS = 1000
    trainer = Trainer(job(**LOGGED), kind(*range(102, 300), rank=1), run, 0)
    try:
        trainer.run()
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(
    ("kind", "error", "last", "last_loss"), [(Exploding, "NonFiniteError", 102, 102), (Raising, "RuntimeError", 100, 1)]
)
def test_the_last_steps_before_a_failure_are_in_the_metrics_of_many_ranks(
    tmp_path: Path, kind: type[Exploding], error: str, last: int, last_loss: int
) -> None:
    """Of a failure on all ranks with the losses; of one rank's own, of the other ranks' at least the steps."""
    run = new_run(tmp_path, **LOGGED)
    assert run_ranks(failing, 2, kind, run) == [error] * 2
    steps = [row["step"] for row in read_json_lines(run.metrics_file)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= last
    assert len(losses(run)) >= last_loss


class Branch(nn.Module):
    """A net, and beside it a weight whose own gradient is no number as soon as it is zero: the loss stays finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Plain().model()
        self.beside = nn.ParameterList([torch.ones(1)])  # the last of the weights

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) + 0.0 * self.beside[0].sqrt()


class Branched(Plain):
    """Its side branch breaks at the given step."""

    def model(self) -> nn.Module:
        return Branch()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 6:
            with torch.no_grad():
                model.beside[0].zero_()
        return super().loss(model, batch)


def test_a_weight_that_is_no_number_is_never_saved(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 9, "global_batch": 24}, "checkpoint": {"every_steps": 3}}
    run = new_run(tmp_path, **sections)
    with pytest.raises(NonFiniteError, match=r"after step 6 weights of the model are not finite: beside.0"):
        train(Branched(), job(**sections), run)
    deadline = time.monotonic() + 20  # the save before is completed in the background
    while not list(run.checkpoints.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [folder.name for folder in run.checkpoints.glob("step-*")] == ["step-00000003"]
