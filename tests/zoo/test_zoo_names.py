"""A name of a task that has come to refer to something else is told, unless that comes back."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo_told import told
from zoo_training import Case, ZooTask, judge


class Stage(enum.Enum):
    EASY = "easy"
    HARD = "hard"


class GoesOn(ZooTask):
    """Goes on to the next of its levels and criteria; of one, its state has the number, of another the name."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.levels = [SimpleNamespace(noise=0.25), SimpleNamespace(noise=0.75)]
        self.level, self.level_saved = self.levels[0], self.levels[0]
        self.criteria = [nn.MSELoss(), nn.MSELoss()]
        self.criterion = self.criteria[0]
        self.stage, self.first_stage = Stage.EASY, Stage.EASY

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.level, self.level_saved = self.levels[1], self.levels[1]
        self.criterion = self.criteria[1]
        self.stage = Stage.HARD
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage = Stage[state["stage"]]


class SavesNumber(GoesOn):
    """Its state has the numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "number": self.levels.index(self.level)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.level = self.level_saved = self.levels[state["number"]]
        self.criterion = self.criteria[state["number"]]


def test_a_name_that_refers_to_another_object_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(GoesOn, tmp_path / "forgets", capfd) == ["task.criterion", "task.level", "task.level_saved"]
    assert told(SavesNumber, tmp_path / "saves", capfd) == []


class Begins(GoesOn):
    """Refers in its second step, by attributes that were not there, to what was, and by others to another array."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.tables, self.sizes = [np.zeros(3), np.ones(3)], [(1, 2), (1, 3)]
        self.table, self.size = self.tables[0], self.sizes[0]
        self.generators = [torch.Generator(), torch.Generator()]
        self.generator = self.generators[0]
        self.chosen: dict[str, Any] = {}
        self.same = [self.levels[0]]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 1:
            self.level_now, self.criterion_now = self.levels[1], self.criteria[1]
            self.first_layer, self.whole = self.trainer.model.get_submodule("0"), model
            self.table, self.size, self.generator = self.tables[1], self.sizes[1], self.generators[1]
            self.chosen["level"] = self.levels[1]
        self.same = [self.levels[0]]
        return ZooTask.loss(self, model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SavesBegun(Begins):
    """Its state has the number, as a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": torch.tensor(int(hasattr(self, "level_now")))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["number"]:
            self.level_now = self.levels[1]


def test_a_name_that_begins_to_refer_to_something_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster_ddp.train.checks.unsaved.MAX_NAMES", 20)
    names = [
        "task.chosen", "task.criterion_now", "task.first_layer", "task.generator", "task.level_now", "task.size",
        "task.table",
    ]  # fmt: skip
    assert told(Begins, tmp_path / "forgets", capfd) == names
    saved = {"task.chosen", "task.criterion_now", "task.generator", "task.level_now", "task.table"}
    assert set(names) - set(told(SavesBegun, tmp_path / "saves", capfd)) == saved


class ByTwoNames(ZooTask):
    """Adds to a list by one name and reads it by another; what is appended to a queue has a name, too."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.window: list[float] = []
        self.reader = SimpleNamespace(window=self.window)
        self.queue: list[Tensor] = []
        self.last: Tensor | None = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.last = loss.detach()
        self.queue.append(self.last)
        self.window.append(float(loss))
        return loss * sum(self.reader.window)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window, "queue": self.queue, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window, self.queue, self.last = state["window"], state["queue"], state["last"]


class FillsBoth(ByTwoNames):
    """Fills the list that both names refer to."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window[:], self.queue, self.last = state["window"], state["queue"], state["last"]


def test_what_two_names_refer_to_and_only_one_gets_back_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(Case(train={"steps": 2, "ema_decay": None}), tmp_path / "one", ByTwoNames)
    assert "task.reader, which no checkpoint contains" in capfd.readouterr().err
    assert told(FillsBoth, tmp_path / "both", capfd) == []
    assert str(judge(Case(), tmp_path / "exact", FillsBoth)) == "exact"
