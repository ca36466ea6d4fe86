"""What comes to have the value of something else that is saved, such as a copy that is made at each save, is told."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from zoo_models import CLASSES, FEATURES, device
from zoo_told import told
from zoo_training import Case, ZooTask

ANCHOR = 1.0


@dataclasses.dataclass(frozen=True)
class Averages:
    """Is replaced as a whole."""

    loss: float = 1.0
    anchor: float = 1.0


class Copies(ZooTask):
    """Copies at each save what changes in every step."""

    anchor_of_class = 1.0

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.steps, self.seen, self.start = 0, 1000, 1000
        self.averages, self.average, self.anchor, self.anchors = Averages(), 1.0, 1.0, [1.0, 1.0]
        self.centre, self.former_centre = torch.zeros(CLASSES), torch.zeros(CLASSES)
        self.first: torch.Tensor | None = None
        self.recent: torch.Tensor | None = None
        self.online = nn.Linear(FEATURES, CLASSES, device=device())
        self.target = copy.deepcopy(self.online)
        self.mean: Any = 0.0
        self.rate, self.rates = 0.5, SimpleNamespace(now=0.5)
        self.is_late, self.switch = False, SimpleNamespace(is_on=False)
        self.stage = self.former_stage = "warm"

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        value = float(loss.detach())
        self.steps, self.seen, self.mean = self.steps + 1, self.seen + 8, 0.9 * self.mean + value
        self.average = 0.9 * self.average + 0.1 * value
        self.averages = dataclasses.replace(self.averages, loss=0.9 * self.averages.loss + 0.2 * value)
        self.centre = 0.9 * self.centre + value
        self.recent = loss.detach()
        with torch.no_grad():
            self.online.weight.add_(value)
        if self.steps % 3 == 0:
            self.copy_all()
        return loss

    def copy_all(self) -> None:
        global ANCHOR
        Copies.anchor_of_class = ANCHOR = self.anchor = self.anchors[1] = self.average
        self.averages = dataclasses.replace(self.averages, anchor=self.averages.loss)
        self.start, self.former_centre, self.first = self.seen, self.centre.clone(), self.recent
        self.target.load_state_dict(self.online.state_dict())
        self.mean = np.float32(self.mean)
        self.rate = self.rates.now = 0.7 * self.rate
        self.is_late = self.switch.is_on = True
        self.stage = self.former_stage = "main"

    def state_dict(self) -> dict[str, Any]:
        names = ("steps", "seen", "average", "centre", "recent", "rate", "is_late")
        named = {name: getattr(self, name) for name in names} | {"of_averages": self.averages.loss}
        named["stages"] = [self.stage, "first"]
        return named | {"online": self.online.state_dict(), "mean": float(self.mean)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("steps", "seen", "average", "centre", "recent", "rate", "is_late", "mean"):
            setattr(self, name, state[name])
        self.averages, (self.stage, _) = Averages(state["of_averages"]), state["stages"]
        self.online.load_state_dict(state["online"])


class CopiesAgain(Copies):
    """Has all copies in its state, or makes them when it loads."""

    def state_dict(self) -> dict[str, Any]:
        more = {"anchors": self.anchors, "target": self.target.state_dict(), "globals": [ANCHOR, self.anchor_of_class]}
        return super().state_dict() | more | {"averages": dataclasses.asdict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        global ANCHOR
        super().load_state_dict(state)
        self.anchors, self.averages = state["anchors"], Averages(**state["averages"])
        self.target.load_state_dict(state["target"])
        ANCHOR, Copies.anchor_of_class = state["globals"]
        if self.steps > 2:
            self.start, self.former_centre, self.first = self.seen, self.centre.clone(), self.recent
            self.anchor, self.mean, self.rates.now = self.average, np.float32(self.mean), self.rate
            self.switch.is_on, self.former_stage = self.is_late, self.stage


def test_what_is_equal_to_something_saved_only_since_a_late_copy_is_told_unless_it_is_copied_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster_ddp.train.checks.unsaved.MAX_NAMES", 20)
    assert told(Copies, tmp_path / "late", capfd, steps=4) == [
        "Copies.anchor_of_class", "task.anchor", "task.anchors", "task.averages", "task.first", "task.former_centre",
        "task.former_stage", "task.mean", "task.rates", "task.start", "task.switch", "task.target",
        "test_zoo_copied_late.ANCHOR",
    ]  # fmt: skip
    assert told(CopiesAgain, tmp_path / "again", capfd, steps=4) == []
