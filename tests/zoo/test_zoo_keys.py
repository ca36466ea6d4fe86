"""Numbers as keys of dicts in the state of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from zoo_told import told
from zoo_training import Case, ZooTask, judge


class CountsByNumber(ZooTask):
    """Counts by the number of a class, which comes back as a string."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.seen: dict[Any, int] = {}
        self.by_name: dict[Any, int] = {}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        for label in batch[1].tolist():
            self.seen[label] = self.seen.get(label, 0) + 1
            self.by_name[label] = self.by_name.get(label, 0) + 1
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {str(key): number for key, number in self.seen.items()}, "by_name": self.by_name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.by_name = state["seen"], state["by_name"]


def test_numbers_as_keys_that_come_back_as_strings_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(CountsByNumber, tmp_path, capfd) == ["task.seen"]


class CountsLate(CountsByNumber):
    """Begins after the first steps."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        return super().loss(model, batch) if self.trainer.step > 1 else ZooTask.loss(self, model, batch)


def test_numbers_as_keys_beside_the_same_as_strings_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(Case(train={"steps": 5, "ema_decay": None}), tmp_path, CountsLate, crashes=(4,))
    assert "task.seen, which no checkpoint contains" in capfd.readouterr().err


class TakesTurns(ZooTask):
    """Takes its weights in turn, and begins with the first one again when it has loaded them."""

    def model(self) -> nn.Module:
        self.weights = {"a": 1.0, "b": 2.0, "c": 3.0}
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        key, weight = next(iter(self.weights.items()))
        self.weights[key] = self.weights.pop(key)
        return super().loss(model, batch) * weight

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.update(state["weights"])


def test_the_order_of_a_dict_in_the_state_has_to_come_back(tmp_path: Path) -> None:
    assert 'comes back as {"weights": {"a": ' in str(judge(Case(), tmp_path, TakesTurns))
