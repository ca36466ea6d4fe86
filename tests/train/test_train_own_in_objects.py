"""What functions that a loop calls keep in objects, and compute the loss from, is told; what is only shown is not."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.watch.in_objects import watch_in_objects
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved


class Trainer:
    """A trainer as most programs have one; the derived ones differ in what they compute the loss from."""

    def __init__(self, *passed_in: Any) -> None:
        self.model, self.messages = nn.Linear(4, 3), list[str]()
        self.mean, self.losses, self.stage = 1.0, [1.0], 0
        self.weights, self.scale, self.helper = torch.ones(3), 1.0, Balance()
        self.saved = Saved([self.model, *passed_in], KeptValues())

    def batches(self) -> Iterator[Tensor]:
        watch = watch_in_objects(self.saved, Reported(self.messages.append))
        for _ in range(2):
            yield torch.rand(2, 4)
            next(watch, None)

    def train(self) -> None:
        for _ in range(1):
            self.before_epoch()
            result = self.train_epoch()
            self.after_epoch(result)

    def train_epoch(self) -> float:
        total = 0.0
        for batch in self.batches():
            total += self.step(batch)
        return total

    def step(self, batch: Tensor) -> float:
        loss = self.loss(batch)
        loss.backward()
        return loss.item()

    def before_epoch(self) -> None: ...
    def after_epoch(self, result: float) -> None: ...
    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()  # type: ignore[no-any-return]


class Balance:
    """Weighs losses by the previous ones."""

    def __init__(self) -> None:
        self.previous, self.calls = 1.0, 0

    def __call__(self, loss: Tensor) -> Tensor:
        scaled, self.previous = loss / self.previous, loss.item()
        self.calls += 1
        return scaled

    @property
    def twice(self) -> float:
        return 2 * self.previous


class ByMean(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        mean = 0.9 * self.mean + 0.1 * loss.item()
        self.mean = mean
        return loss / self.mean


class ByHistory(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        self.losses.append(loss.item())
        return loss / float(np.mean(self.losses))


class ByFlag(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        if loss < 0:
            self.stage = 1
        return loss * (1 + self.stage)


class ByObject(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        return self.helper(super().loss(batch))


class ByProperty(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch) * self.helper.twice
        self.helper(loss)
        return loss


class AfterEpoch(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        return (self.model(batch) * self.weights).square().mean()  # type: ignore[no-any-return]

    def after_epoch(self, result: float) -> None:
        self.weights = 1 + self.model.weight.detach().mean(1)


class OtherCriterion(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()

    def loss(self, batch: Tensor) -> Tensor:
        return self.criterion(self.model(batch), torch.zeros(2, dtype=torch.long))  # type: ignore[no-any-return]

    def after_epoch(self, result: float) -> None:
        self.criterion = nn.CrossEntropyLoss(self.model.weight.detach().mean(1).exp())


class Memory(nn.Module):
    """Keeps its targets in no buffer, as that of early-learning regularization."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = torch.zeros(2, 3)

    def forward(self, outputs: Tensor) -> Tensor:
        self.targets[:2] = 0.9 * self.targets[:2] + 0.1 * outputs.detach()
        return (outputs - self.targets).square().mean()


class ByMemory(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def loss(self, batch: Tensor) -> Tensor:
        return self.memory(self.model(batch))  # type: ignore[no-any-return]


class ByTarget(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(4, 3)

    def loss(self, batch: Tensor) -> Tensor:
        if self.stage % 10 == 0:
            self.target.load_state_dict(self.model.state_dict())
        self.stage += 1
        return (self.model(batch) - self.target(batch)).square().mean()  # type: ignore[no-any-return]


class ByShuffled(Trainer):
    def loss(self, batch: Tensor) -> Tensor:
        if self.stage == 0:
            random.shuffle(self.losses)
        return super().loss(batch) * self.losses[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ByMean, "ByMean.mean"),
        (ByHistory, "ByHistory.losses"),
        (ByFlag, "ByFlag.stage"),
        (ByObject, "Balance.previous"),
        (ByProperty, "Balance.previous"),
        (AfterEpoch, "AfterEpoch.weights"),
        (ByShuffled, "ByShuffled.losses"),
        (OtherCriterion, "OtherCriterion.criterion"),
        (ByMemory, "Memory.targets"),
        (ByTarget, "ByTarget.stage"),
    ],
)
def test_what_methods_compute_the_loss_from_and_set_for_later_is_told(kind: type[Trainer], name: str) -> None:
    trainer = kind()
    trainer.train()
    (message,) = trainer.messages
    assert f"computed from {name}, which earlier batches or epochs set" in message


class BeforeEpoch(AfterEpoch):
    """Sets the weights in each epoch, and shows what it counts."""

    def before_epoch(self) -> None:
        self.weights = torch.full((3,), 2.0)

    def loss(self, batch: Tensor) -> Tensor:
        self.features = self.model(batch)
        self.losses.append(float(self.features.detach().mean()))
        self.stage += 1
        if self.stage % 2 == 0:
            print(self.stage, np.mean(self.losses))
        return self.of_features()

    def of_features(self) -> Tensor:
        return (self.features * self.weights).square().mean()  # type: ignore[no-any-return]

    def after_epoch(self, result: float) -> None:
        print(result, self.helper.calls)


def test_what_each_step_or_epoch_sets_before_it_reads_it_or_only_shows_is_not_told() -> None:
    trainer = BeforeEpoch()
    trainer.train()
    assert trainer.messages == []


def test_what_a_passed_in_object_holds_is_not_told() -> None:
    trainer = ByObject()
    trainer.saved = Saved([trainer.model, trainer.helper], KeptValues())
    trainer.train()
    assert trainer.messages == []


class Plateau:
    """Lowers the rate."""

    def step(self, result: float) -> None: ...


class ByResult(Trainer):
    scheduler = Plateau()

    def after_epoch(self, result: float) -> None:
        self.scheduler.step(result)


def test_a_sum_that_a_running_function_returns_for_the_scheduler_is_told() -> None:
    trainer = ByResult()
    trainer.train()
    (message,) = trainer.messages
    assert "computed from total, which" in message


def one_step(model: nn.Module, batch: Tensor, state: dict[str, float]) -> None:
    loss = model(batch).square().mean() / state.get("mean", 1.0)
    state["mean"] = 0.9 * state.get("mean", 1.0) + 0.1 * loss.item()
    loss.backward()


def test_a_dict_that_the_loop_passes_to_its_step_is_told() -> None:
    trainer, state = Trainer(), dict[str, float]()
    for batch in trainer.batches():
        one_step(trainer.model, batch, state)
    (message,) = trainer.messages
    assert "computed from state, which" in message


class WithSetting(ByMean):
    """Does not use what it could."""

    adapts = False

    def loss(self, batch: Tensor) -> Tensor:
        loss = Trainer.loss(self, batch) * self.scale
        if self.adapts:
            self.scale *= 0.9
        return loss


def test_what_a_setting_turns_off_is_not_told() -> None:
    trainer = WithSetting()
    trainer.train()
    assert trainer.messages == []


EMA = 1.0


def by_global(model: nn.Module, batch: Tensor) -> None:
    global EMA
    loss = model(batch).square().mean() / EMA
    loss.backward()
    EMA = 0.9 * EMA + 0.1 * loss.item()


def made_step() -> Any:
    mean = 1.0

    def step(model: nn.Module, batch: Tensor) -> None:
        nonlocal mean
        loss = model(batch).square().mean() / mean
        loss.backward()
        mean = 0.9 * mean + 0.1 * loss.item()

    return step


NAMES = argparse.Namespace(mean=None)


def by_namespace(model: nn.Module, batch: Tensor) -> None:
    loss = model(batch).square().mean()
    NAMES.mean = loss.item() if NAMES.mean is None else 0.9 * NAMES.mean + 0.1 * loss.item()
    (loss / NAMES.mean).backward()


@pytest.mark.parametrize(
    ("step", "name"), [(by_namespace, "Namespace.mean"), (by_global, "EMA"), (made_step(), "mean")]
)
def test_what_a_step_sets_outside_of_itself_is_told(step: Any, name: str) -> None:
    trainer = Trainer()
    for batch in trainer.batches():
        step(trainer.model, batch)
    (message,) = trainer.messages
    assert f"computed from {name}, which" in message


class Drawing(Trainer):
    """Draws where it looks like an attribute."""

    drawn = 0

    @property
    def noise(self) -> Tensor:
        self.drawn += 1
        return torch.rand(2, 4)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch + self.noise.sqrt())


def test_what_a_program_computes_when_it_is_asked_is_not_asked() -> None:
    trainer = Drawing()
    trainer.train()
    assert trainer.drawn == 2
