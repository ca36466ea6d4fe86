"""What a model makes in its first forward pass from data is restored; what it makes from shapes only is made again.

What a task makes late of what it already keeps is told.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from train_ranks import run_ranks
from zoo_models import CLASSES, FEATURES, mlp
from zoo_told import told
from zoo_training import Case, ZooTask, judge

from cluster_ddp.train.checks import unsaved


class Normalises(nn.Module):
    """Makes its constants from the first batch it sees, and a table of positions."""

    def __init__(self, follows: float = 0.0) -> None:
        super().__init__()
        self.inner, self.follows = mlp(), follows

    def forward(self, inputs: Tensor) -> Any:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", inputs.mean(0).detach(), persistent=False)
            self.register_buffer("mask", torch.ones(len(inputs), len(inputs)).tril(), persistent=False)
        self.mean: Tensor
        self.mean.lerp_(inputs.mean(0).detach(), self.follows)
        return self.inner(inputs - self.mean)


class OfFirstBatch(ZooTask):
    def model(self) -> nn.Module:
        return Normalises()


class OfAllBatches(ZooTask):
    """Of a part of the model."""

    def model(self) -> nn.Module:
        return nn.Sequential(Normalises(0.1), nn.Linear(CLASSES, CLASSES))


@pytest.mark.parametrize("kind", [OfFirstBatch, OfAllBatches])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_buffer_made_from_the_first_batch_is_restored(
    kind: type[ZooTask], ema: float | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert str(judge(Case(train={"ema_decay": ema}), tmp_path / "exact", kind)) == "exact"
    capfd.readouterr()
    assert told(kind, tmp_path / "told", capfd) == []


class Empties(nn.Module):
    """Has a tensor until its first forward pass only."""

    def __init__(self, deletes: bool) -> None:
        super().__init__()
        self.inner, self.deletes = mlp(), deletes
        self.register_buffer("first", torch.ones(FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        first = getattr(self, "first", None)
        if self.deletes and first is not None:
            del self.first
        elif not self.deletes:
            self.first = None
        return self.inner(inputs if first is None else inputs + first)


class OfEmptied(ZooTask):
    def model(self) -> nn.Module:
        return Empties(self.case.loss == "(sum, weight)")


@pytest.mark.parametrize("loss", ["mean", "(sum, weight)"])
def test_a_buffer_that_is_emptied_or_deleted_is_refused(loss: str, tmp_path: Path) -> None:
    verdict = judge(Case(loss=loss), tmp_path, OfEmptied)
    assert "first of the model is None or deleted now" in (verdict.refused or ""), verdict


class Masks(nn.Module):
    """Makes a mask that has another size on each rank, and, if it shifts, keeps the mean of the first batch there."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        self.inner, self.shifts = mlp(), shifts
        self.register_buffer("mask", None, persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        size = 8 + 4 * dist.get_rank()
        if self.mask is None:
            self.mask = torch.ones(size, size).tril()
        if self.shifts and not hasattr(self, "mean"):
            self.register_buffer("mean", inputs.mean(0).detach(), persistent=False)
        return self.inner(inputs - self.mean if self.shifts else inputs)


class OfMasks(ZooTask):
    def model(self) -> nn.Module:
        return Masks(self.case.loss == "(sum, weight)")


def judge_masks(folder: Path) -> list[str]:
    losses = ("mean", "(sum, weight)")
    return [str(judge(Case(loss=loss, train={"global_batch": 12}), folder / loss, OfMasks)) for loss in losses]


def test_a_mask_may_have_another_size_on_each_rank_and_what_is_made_from_data_is_compared(tmp_path: Path) -> None:
    for of_masks, of_mean in run_ranks(judge_masks, 2, tmp_path):
        assert of_masks == "exact"
        assert "differs between the ranks: buffer.mean" in of_mean


class ChoosesLate(ZooTask):
    """Makes in its second step, from what it keeps in one list, another, as long as the number of its steps."""

    def __init__(self, how: Callable[[list[Tensor]], Any], case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.how, self.steps = how, 0
        self.weights, self.filled = [torch.ones(()), torch.ones(())], []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        if self.steps == 2:
            self.chosen, self.filled = self.how(self.weights), self.weights[:]
        for number, weight in enumerate(self.weights):
            weight += 0.1 * number
        return super().loss(model, batch) * (1 + sum(getattr(self, "chosen", [])) + sum(self.filled))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.steps = state["weights"], state["steps"]


class ChoosesAgain(ChoosesLate):
    """Makes it also when it loads."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.steps > 1:
            self.chosen, self.filled = self.how(self.weights), self.weights[:]


@pytest.mark.parametrize("how", [list, tuple, lambda weights: [weights[1], weights[0]]])
def test_a_list_of_parts_that_is_made_late_is_told_unless_it_is_made_again(
    how: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(partial(ChoosesLate, how), tmp_path / "late", capfd) == ["task.chosen", "task.filled"]
    assert told(partial(ChoosesAgain, how), tmp_path / "again", capfd) == []


class LooksBack(ZooTask):
    """Has the last of its losses, and of these as numbers, in lists of their own, which loading makes again."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.all: list[Tensor] = []
        self.recent: list[Tensor] = []
        self.numbers: list[float] = []
        self.few: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.all.append(loss.detach())
        self.numbers.append(float(loss.detach()))
        self.recent, self.few = self.all[-2:], self.numbers[-2:]
        return loss * sum(self.recent)

    def state_dict(self) -> dict[str, Any]:
        return {"all": self.all, "numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all, self.numbers = state["all"], state["numbers"]
        self.recent, self.few = self.all[-2:], self.numbers[-2:]


def test_a_window_that_loading_makes_again_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(LooksBack, tmp_path, capfd, steps=4) == []


class Drops(ZooTask):
    """Warms up by a list that it drops, and takes into use what it has, beside a tensor that changes."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.warm: list[float] | None = [1.5, 2.5]
        self.pool = [torch.ones(2), torch.ones(2)]
        self.active: list[Tensor] = []
        self.sums = torch.zeros(3)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        factor = 1 if self.warm is None else sum(self.warm)
        self.warm = None
        if len(self.active) < len(self.pool):
            self.active.append(self.pool[len(self.active)])
        self.sums += 0.25
        return loss * factor * (1 + sum(map(torch.sum, self.active)) + self.sums.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"warm": self.warm, "active": len(self.active), "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.warm, self.sums = state["warm"], state["sums"]
        self.active = self.pool[: state["active"]]


def test_lists_that_a_step_drops_and_lists_of_what_is_in_another_are_exact(tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, Drops)) == "exact"


class Replays(ZooTask):
    """Has its memory in an object, and the state has it as one tensor, with at most `most` samples."""

    def __init__(self, most: int, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.replay, self.most = SimpleNamespace(memory=[], scaler=torch.amp.GradScaler("cpu")), most
        self.replay.scaler.scale(torch.ones(()))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.replay.memory.append(loss.detach().repeat(2))
        return loss * torch.stack(self.replay.memory).mean()

    def state_dict(self) -> dict[str, Any]:
        memory = self.replay.memory[-self.most :]
        return {"memory": torch.stack(memory) if memory else None, "scaler": self.replay.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replay.memory = [] if state["memory"] is None else list(state["memory"])
        self.replay.scaler.load_state_dict(state["scaler"])


class ReplaysInModel(ZooTask):
    """Has its memory in its model, by the step."""

    def model(self) -> Any:
        self.net: Any = super().model()
        self.net.memory = defaultdict(list)
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.net.memory[len(self.net.memory)].append(loss.detach().repeat(2))
        return loss * torch.stack([*chain(*self.net.memory.values())]).mean()

    def state_dict(self) -> dict[str, Any]:
        return {"memory": torch.stack([*map(torch.stack, self.net.memory.values())]) if self.net.memory else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.memory.clear()
        self.net.memory.update({} if state["memory"] is None else {n: list(t) for n, t in enumerate(state["memory"])})


def test_a_memory_that_the_state_has_as_one_tensor_is_told_only_once_it_is_not_all_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(partial(Replays, 9), tmp_path / "all", capfd, steps=6) == []
    assert told(ReplaysInModel, tmp_path / "in model", capfd, steps=6) == []
    assert told(partial(Replays, 3), tmp_path / "some", capfd, steps=6) == ["task.replay"]


class WarmsUp(ZooTask):
    """Weighs its losses by the first ones, from the fifth step on, and looks what has been said when it is saved."""

    def __init__(self, capfd: pytest.CaptureFixture[str], case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.first, self.weight, self.steps = 0.0, 1.0, 0
        self.read = lambda: capfd.readouterr().err

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.steps < 6 or "training changes task.weight, which no checkpoint contains" in self.read()
        loss = super().loss(model, batch)
        self.steps += 1
        if self.steps <= 4:
            self.first += float(loss.detach())
        if self.steps == 5:
            self.weight = 4 / self.first
        return loss * self.weight

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.steps = state["first"], state["steps"]


def test_what_changes_between_two_saves_is_told_at_the_second(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume after a kill at that moment repeats no step whose loss could tell."""
    monkeypatch.setattr(unsaved, "SHORT_SECONDS", math.inf)
    assert told(partial(WarmsUp, capfd), tmp_path, capfd, steps=7) == []


class Switches(ZooTask):
    """Has another criterion and schedule after some steps, which loading makes again or not."""

    def __init__(self, is_made_again: bool, after: int, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.criterion: nn.Module = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.penalty: Any = F.mse_loss
        self.steps, self.is_made_again, self.after = 0, is_made_again, after
        self.schedule = SimpleNamespace(rates=torch.ones(3))

    def switch(self) -> None:
        if self.steps > self.after:
            self.criterion, self.penalty, self.schedule.rates = nn.MSELoss(), F.l1_loss, torch.zeros(2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        self.switch()
        penalty = self.criterion(torch.ones(2), torch.zeros(2)) + self.penalty(torch.ones(2), torch.zeros(2))
        return super().loss(model, batch) + penalty * self.schedule.rates.sum()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        if self.is_made_again:
            self.switch()


@pytest.mark.parametrize("after", [1, 2])  # the second step shows it, or only a later look does
def test_an_object_of_another_class_is_told_unless_loading_makes_it_again(
    after: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(partial(Switches, True, after), tmp_path / "again", capfd, steps=4) == []
    names = ["task.criterion", "task.penalty", "task.schedule"]
    assert told(partial(Switches, False, after), tmp_path / "late", capfd, steps=4) == names


class QueuesByLabel(ZooTask):
    """Has the last few scores of each label, which the state has as one tensor for each."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.queues = defaultdict[int, deque[Tensor]](partial(deque, maxlen=3))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        scores = model(inputs)
        loss = F.cross_entropy(scores, labels)
        for label in list(self.queues):
            loss = loss + 0.1 * (scores.mean(0) * torch.stack(list(self.queues[label])).mean(0)).sum()
        for row, label in zip(scores.detach(), labels.tolist(), strict=True):
            self.queues[label].append(row)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"queues": {str(label): torch.stack(list(queue)) for label, queue in self.queues.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.queues.clear()
        for label, rows in state["queues"].items():
            self.queues[int(label)].extend(rows.unbind())


def test_lists_that_loading_fills_again_are_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(QueuesByLabel, tmp_path, capfd, steps=7) == []
