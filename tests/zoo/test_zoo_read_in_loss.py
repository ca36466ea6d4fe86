"""What tasks read in loss() besides the model, and bring back from their own state."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo_training import Case, ZooTask, judge


class ReadsItsRate(ZooTask):
    """Weighs its loss by the learning rate that its optimizer has at the moment."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1.0 + 50.0 * self.made.param_groups[0]["lr"])


@pytest.mark.parametrize("scaler", [None, {"initial": 1e7}, {"growth_interval": 1}])  # the last two skip updates
def test_the_rate_that_loss_reads_is_that_of_the_last_update(scaler: dict[str, Any] | None, tmp_path: Path) -> None:
    train = {"warmup_steps": 6, **({"precision": "fp16", "scaler": scaler} if scaler else {})}
    assert str(judge(Case(train=train), tmp_path, ReadsItsRate)) == "exact"


class Window(ZooTask):
    """Adds the mean of its last losses."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.last: collections.deque[float] = collections.deque(maxlen=2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.last.append(float(loss.detach()))
        return loss * (sum(self.last) / len(self.last))

    def state_dict(self) -> dict[str, Any]:
        return {"last": list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = collections.deque(state["last"], maxlen=2)


class WindowWithoutEnd(Window):
    """Forgets the limit of its window as it is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = collections.deque(state["last"])


class WindowInList(Window):
    """Goes on with a list, which has no limit."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


def test_a_window_that_comes_back_with_its_limit_is_exact(tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, Window)) == "exact"


@pytest.mark.parametrize("kind", [WindowWithoutEnd, WindowInList])
def test_a_window_that_comes_back_without_its_limit_is_refused(kind: type[Window], tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, kind)
    assert verdict.refused_at == 2 and "task.last: a deque with maxlen=2" in (verdict.refused or ""), verdict


class AddsWhenLoaded(ZooTask):
    """Counts labels in a dict, to which its load_state_dict adds."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.seen: dict[int, int] = {}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        for label in batch[1].tolist():
            self.seen[label] = self.seen.get(label, 0) + 1
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.update(state["seen"])


def test_a_task_that_adds_what_it_loads_is_told_to_replace(tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, AddsWhenLoaded)
    assert "seen\n    let it replace what is there" in (verdict.refused or ""), verdict


class TwoViews(ZooTask):
    """Adds to a tensor and reads a view of it; both are in its state."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.flat = torch.zeros(8)
        self.head = self.flat[:4]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.flat += 1.0
        return super().loss(model, batch) * self.head.mean()

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.flat, "head": self.head}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.flat, self.head = state["flat"], state["head"]


class OneView(TwoViews):
    """Makes the view again."""

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.flat}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.flat = state["flat"]
        self.head = self.flat[:4]


def test_a_view_of_a_part_that_comes_back_as_a_copy_is_refused(tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path / "two", TwoViews)
    assert verdict.refused_at == 2 and "task.head: is a part of task.flat" in (verdict.refused or ""), verdict
    assert str(judge(Case(), tmp_path / "one", OneView)) == "exact"
