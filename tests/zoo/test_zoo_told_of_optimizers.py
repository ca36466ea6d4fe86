"""What an optimizer keeps beside its state, and what is set in it by hand, is told or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer
from zoo_training import Case, ZooTask, judge

from cluster_ddp.train import update


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        ("a number in itself that changes later", "task.losses"),
        ("a list that its groups share", "task.losses"),
        ("a number in itself that it never reads", "optimizer.before, task.losses"),
        ("state: own extras", "task.losses"),
        ("numbers instead of tensors", "task.losses"),
        ("SGD momentum", "task.losses"),
    ],
)
def test_what_an_optimizer_keeps_and_is_not_refused_for_is_told(
    optimizer: str, named: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert str(judge(Case(optimizer), tmp_path, ZooTask)) == "exact"
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert any(f"changes {named}, which" in line for line in told)
    assert any("optimizer." in line for line in told) == ("optimizer." in named)


class Watched(ZooTask):
    """Its optimizer has a hook that counts updates, as a profiler or a logger has."""

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        optimizer, count = super().optimizer(model, lr), [0]

        def counts(*_: Any) -> None:
            count[0] += 1

        optimizer.register_step_post_hook(counts)
        return optimizer


def test_what_a_hook_of_the_optimizer_counts_is_told_and_not_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert str(judge(Case(), tmp_path, Watched)) == "exact"
    assert "optimizer._optimizer_step_post_hooks" in capfd.readouterr().err


class FusedOnDevice(ZooTask):
    """Chooses how updates are computed by the device; the optimizer made for the check is on the CPU."""

    is_on_device = True

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        optimizer = super().optimizer(model, lr)
        optimizer.defaults["fused"], self.is_on_device = self.is_on_device, False
        return optimizer


def test_an_optimizer_may_be_fused_on_a_device_only(tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, FusedOnDevice)) == "exact"


class SetsRates(ZooTask):
    """Lowers the learning rate by hand, in a step that a resume does not repeat."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 5:
            self.made.param_groups[0]["lr"] *= 0.1
        return super().loss(model, batch)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_rate_that_is_set_by_hand_has_no_effect_and_is_told(
    schedule: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert str(judge(Case(train={"schedule": schedule}), tmp_path, SetsRates)) == "exact"
    assert "the optimizer's group 0 was set to" in capfd.readouterr().err


class ChangesLate(ZooTask):
    """Lets a parameter change its group, or changes a default of the optimizer, from its fifth step on."""

    def __init__(self, what: str, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.what = what

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step >= 4 and self.what == "defaults":
            self.made.defaults["weight_decay"] = 0.5
        elif self.trainer.step == 4:
            first, second = (group["params"] for group in self.made.param_groups)
            second.append(first.pop())
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("group", "holds different parameters, or in a different order"),
        ("defaults", "changed weight_decay in the optimizer's"),
    ],
)
def test_what_training_changes_late_of_groups_and_defaults_is_refused_in_that_step(
    what: str, message: str, tmp_path: Path
) -> None:
    verdict = judge(Case("Adam in two groups"), tmp_path, partial(ChangesLate, what))
    assert message in (verdict.refused or "") and verdict.refused_at == 5, verdict


class BeginsAnew(ZooTask):
    """Forgets a late step's momenta of a parameter, as when adapters are merged or a head is replaced."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 5:
            self.made.state.pop(next(self.trainer.model.parameters()))
        return super().loss(model, batch)


def test_a_state_that_begins_anew_is_saved_as_any_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(train={"ema_decay": None}), tmp_path, BeginsAnew)) == "exact"
    assert "optimizer." not in capfd.readouterr().err


@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD momentum fused", "AdamW"])
def test_an_answer_on_the_device_is_no_state_of_the_optimizer(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a fused optimizer is told by a tensor whether to leave its update out."""
    monkeypatch.setattr(update, "any_not_finite", update.any_not_finite_on_device)
    assert str(judge(Case(optimizer), tmp_path)) == "exact"
