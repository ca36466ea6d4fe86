"""What a task forgets to save is told, also where its values are in the state by chance."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo_models import CLASSES, FEATURES, mlp
from zoo_told import told
from zoo_training import Case, ZooTask, judge


class Centres(nn.Module):
    """Follows the mean of its inputs through ``.data``, which torch does not count as a change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Any:
        self.mean.data.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return self.inner(inputs - self.mean)


class OfCentres(ZooTask):
    def model(self) -> nn.Module:
        return Centres()


class Omits(nn.Sequential):
    """Leaves its first layers, one of which is not even frozen, out of its state_dict()."""

    def state_dict(self, *arguments: Any, **more: Any) -> Any:
        whole = super().state_dict(*arguments, **more)
        return type(whole)((name, value) for name, value in whole.items() if name.startswith("2."))


class OfOmitted(ZooTask):
    def model(self) -> nn.Module:
        return Omits(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("kind", [OfCentres, OfOmitted])
def test_what_the_model_omits_and_changes_is_saved(kind: type[ZooTask], tmp_path: Path) -> None:
    assert str(judge(Case(train={"ema_decay": None}), tmp_path, kind)) == "exact"


class TakesTurns(ZooTask):
    """Forgets whose turn it is, while its state holds the same value in other places."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.turn, self.warm, self.counts = False, True, [0, 1, 2, 3]
        self.seen = self.rounds = 0  # alike, but only one is saved
        self.other_turn = False

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        self.turn = self.trainer.step == 1
        self.other_turn = not self.other_turn
        self.seen, self.rounds = self.seen + 1, self.rounds + 1
        self.warm = self.trainer.step < 1
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "warm": self.warm, "seen": self.seen, "flags": [True, False]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.warm, self.seen = state["counts"], state["warm"], state["seen"]


def test_a_flag_whose_value_is_in_the_state_by_chance_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(TakesTurns, tmp_path, capfd) == ["task.other_turn", "task.rounds", "task.turn"]


class OfSinglePrecision(ZooTask):
    """Keeps a mean as a number of NumPy, and gets a number of Python back, which has more digits from then on."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.mean, self.double = np.float32(0), np.float64(0)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.mean, self.double = (type(mean)(mean * 0.9 + float(loss)) for mean in (self.mean, self.double))
        return loss * float(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": float(self.mean), "double": float(self.double)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.double = state["mean"], state["double"]


def test_a_number_that_comes_back_with_another_precision_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(OfSinglePrecision, tmp_path, capfd) == ["task.mean"]


class Stage(enum.Enum):
    EARLY = 1
    LATE = 2


class ChangesStage(ZooTask):
    """Has a stage of its own only once it has changed."""

    stage = Stage.EARLY

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step >= 1:
            self.stage = Stage.LATE
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage = Stage[state["stage"]]


def test_the_members_of_an_enum_are_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(ChangesStage, tmp_path, capfd) == []


class SavesOnlyHistory(ZooTask):
    """Its step depends on the last loss in several forms, and its state has all losses, in a list and by name."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.history: list[Tensor] = []
        self.by_name: dict[str, float] = {}
        self.last, self.restored, self.meter = torch.zeros(()), torch.zeros(()), SimpleNamespace(last=torch.zeros(()))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch) * (1 + 0.1 * (self.last + self.restored + self.meter.last))
        self.history.append(loss.detach())
        self.by_name[f"step {len(self.by_name)}"] = float(loss)
        self.last, self.restored, self.meter.last = loss.detach(), loss.detach(), loss.detach()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "by_name": self.by_name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history, self.by_name = state["history"], state["by_name"]
        self.restored = self.history[-1].clone() if self.history else torch.zeros(())


def test_a_value_that_is_in_the_state_as_part_of_a_history_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(SavesOnlyHistory, tmp_path, capfd) == ["task.last", "task.meter"]


class CountsTwice(ZooTask):
    """Counts its steps in five places, and its state has one of these counts, by which it restores two others."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.steps = 0

    def model(self) -> nn.Module:
        self.counted, self.teacher = super().model(), mlp()
        for part in self.counting():
            part.steps = 0
        return self.counted

    def counting(self) -> list[Any]:
        return [network[number] for network in (self.counted, self.teacher) for number in (0, 2)]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        for part in self.counting():
            part.steps += 1
        return super().loss(model, batch) * sum(part.steps for part in self.counting())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = self.counted[0].steps = self.teacher[0].steps = state["steps"]


def test_a_count_that_is_equal_to_one_in_the_state_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(CountsTwice, tmp_path, capfd) == ["model.2.steps", "task.teacher"]


class Stops(ZooTask):
    """Sets a number to zero, and a flag, while its state has numbers that do not change."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.strength, self.late = SimpleNamespace(now=4), SimpleNamespace(now=False)
        self.numbers = [torch.tensor(1)]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.strength.now, self.late.now = 0, True
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.numbers[0], "none": torch.zeros(0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers[0] = state["number"]


def test_what_becomes_zero_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Stops, tmp_path, capfd) == ["task.late", "task.strength"]


class ReadsFile(ZooTask):
    """Reads a line in each step."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.lines = Path(__file__).open()  # noqa: SIM115 (it stays open)
        self.log = Path(os.devnull).open("w")  # noqa: SIM115

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.log.write(self.lines.readline())
        return super().loss(model, batch)


def test_the_place_in_a_text_file_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(ReadsFile, tmp_path, capfd) == ["task.lines"]


class NamesParts(ZooTask):
    """Gives parts of the model names in each step; two only if they have none yet."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        inner: Any = self.trainer.model
        self.encoder, self.weight, self.weights = inner[0], inner[0].weight.data, list(inner.parameters())
        if not hasattr(self, "chosen"):
            self.chosen = inner[0 if self.trainer.step < 3 else 2]
        if self.trainer.step == 3:
            self.late = inner[2]
        try:
            drawn = self.drawn
        except AttributeError:
            drawn = self.drawn = inner[0 if self.trainer.step < 3 else 2]
        return super().loss(model, batch) * (1 + self.chosen.weight.mean() + drawn.weight.mean())


def test_parts_of_the_model_that_each_step_names_are_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(NamesParts, tmp_path, capfd, steps=5) == ["task.chosen", "task.drawn", "task.late"]


class Counting:
    lost = 0


class Defaults(ZooTask):
    """Its class has the first values of what later steps set, and change only if the loss grows."""

    worse, forgotten = 0, 0

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.inner = Counting()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        loss = super().loss(model, batch)
        if self.trainer.step > 2:
            self.worse = self.inner.lost = int(float(loss.detach()) > 100.0)
            self.forgotten = 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"worse": self.worse, "lost": self.inner.lost}

    def load_state_dict(self, state: Any) -> None:
        self.worse, self.inner.lost = state["worse"], state["lost"]


def test_a_default_of_the_class_that_a_step_sets_again_is_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(Defaults, tmp_path, capfd, steps=5) == ["task.forgotten"]


class Scripted(ZooTask):
    """Its model has a scripted part."""

    def model(self) -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Linear(FEATURES, 4)), nn.Linear(4, CLASSES))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_are_refused_by_name(tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, Scripted)
    assert verdict.refused_at == -1 and "'0' of model() is a scripted module" in (verdict.refused or ""), verdict
