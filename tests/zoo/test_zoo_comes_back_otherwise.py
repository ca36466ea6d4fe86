"""What the state of a task holds in another form, such as rounded, is told if it would not come back as it was."""

from __future__ import annotations

import copy
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from zoo_models import CLASSES, device
from zoo_told import told
from zoo_training import Case, ZooTask, judge


class Averages(ZooTask):
    """Averages the weights by itself, draws them to the average, and forgets it."""

    def model(self) -> nn.Module:
        model = super().model()
        self.average: dict[str, Tensor] = copy.deepcopy(dict(model.to(device()).state_dict()))
        self.first = {"average": copy.deepcopy(self.average)}
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        far: Any = 0.0
        for name, weight in model.named_parameters():
            self.average[name].lerp_(weight.detach(), 0.1)
            far += (weight - self.average[name]).square().sum()
        return super().loss(model, batch) + far


class AveragesInHalf(Averages):
    """Saves it in fewer bits."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": {name: weight.half() for name, weight in self.average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {name: weight.float() for name, weight in state["average"].items()}


class AveragesInPlace(AveragesInHalf):
    """The same, copied back into the tensors, which the task has from the start."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        super().model()

    def model(self) -> nn.Module:
        return ZooTask.model(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.average.items():
            weight.copy_(state["average"][name])


class AveragesStale(Averages):
    """Saves what it was at first."""

    def state_dict(self) -> dict[str, Any]:
        return self.first

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


@pytest.mark.parametrize("kind", [Averages, AveragesInHalf, AveragesInPlace, AveragesStale])
def test_an_average_that_would_not_come_back_is_told(
    kind: type[ZooTask], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(kind, tmp_path, capfd) == ["task.average"]


class Cools(ZooTask):
    """Its temperature is a tensor, and comes back as a number, which is multiplied in more bits."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.kept = SimpleNamespace(rate=1.0)
        self.heat, self.best = torch.ones(()), float("inf")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.heat = self.heat * 0.7371 + 0.1
        self.kept.rate *= 0.7371
        loss = super().loss(model, batch)
        self.best = min(loss.detach(), self.best)
        return loss * self.heat

    def state_dict(self) -> dict[str, Any]:
        return {"heat": float(self.heat), "rate": round(self.kept.rate, 3), "best": float(self.best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heat, self.best = state["heat"], state["best"]
        self.kept = SimpleNamespace(rate=state["rate"])


class CoolsExactly(Cools):
    """Comes back as it was."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rate": self.kept.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heat, self.best = torch.tensor(state["heat"]), state["best"]
        self.kept = SimpleNamespace(rate=state["rate"])


def test_a_tensor_that_comes_back_as_a_number_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Cools, tmp_path / "number", capfd) == ["task.heat", "task.kept"]
    assert told(CoolsExactly, tmp_path / "tensor", capfd) == []


class Renews(ZooTask):
    """Its state is a copy that is renewed only in every second step."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.scale, self.rate, self.kept = torch.ones(()), 1.0, SimpleNamespace(rate=1.0)
        self.copy: dict[str, Any] = {"scale": self.scale, "rate": 1.0, "kept": 1.0}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        self.scale, self.rate = self.scale * 1.01, self.rate * 1.02
        self.kept.rate *= 1.03
        if self.trainer.step % 2:
            self.copy = {"scale": self.scale.clone(), "rate": self.rate, "kept": self.kept.rate}
        return super().loss(model, batch) * self.scale * self.rate * self.kept.rate

    def state_dict(self) -> dict[str, Any]:
        return self.copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copy = dict(state)
        self.scale, self.rate, self.kept = state["scale"], state["rate"], SimpleNamespace(rate=state["kept"])


class LooksBack(ZooTask):
    """Restores the last loss from the list of all."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.all: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch) * (1 + getattr(self, "last", 0.0))
        self.last = loss.detach()
        self.all.append(self.last)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"all": self.all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all = state["all"]
        if self.all:
            self.last = self.all[-1]


def test_a_state_that_is_not_always_renewed_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Renews, tmp_path / "copy", capfd) == ["task.kept", "task.rate", "task.scale"]
    assert told(LooksBack, tmp_path / "list", capfd) == []


class Forgets(ZooTask):
    """Changes a number, a tensor or extra state of its model in its third step, and does not take it back."""

    def __init__(self, what: str, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.what = what
        self.seen: dict[str, Any] = {"number": 1.0, "tensor": torch.ones(2)}

    def model(self) -> nn.Module:
        self.counts = Counts()
        return nn.Sequential(super().model(), self.counts)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 2 and self.what == "model":
            self.counts.seen += 1
        elif self.trainer.step == 2:
            self.seen[self.what] = self.seen[self.what] + 1.0
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {**self.seen, "numbers": set(range(0, 7000, 7)), "host": str(self.crash)}


class Counts(nn.Module):
    seen = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize("what", ["number", "tensor", "model"])
def test_what_changes_late_and_is_not_taken_back_is_refused_at_the_resume(what: str, tmp_path: Path) -> None:
    verdict = judge(Case(train={"ema_decay": None}), tmp_path, partial(Forgets, what))
    name = {"number": "task.number: 2.0 comes back", "tensor": "task.tensor: different", "model": "extra_state.1."}
    assert name[what] in (verdict.refused or "") and verdict.refused_at is None, verdict
    assert "load_state_dict() of the task has to restore" in (verdict.refused or "")


class MakesLate(ZooTask):
    """Makes a critic in its first step; its state holds it, and loading makes it."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.critic: nn.Linear | None = None

    def _make(self) -> nn.Linear:
        self.critic = nn.Linear(CLASSES, 1)
        self.second = Adam(self.critic.parameters(), lr=0.1)
        return self.critic

    def loss(self, model: nn.Module, batch: Any) -> Any:
        critic = self.critic or self._make()
        self.second.zero_grad()
        critic(torch.ones(CLASSES)).sum().backward()
        self.second.step()
        return super().loss(model, batch) * critic.weight.detach().mean()

    def state_dict(self) -> dict[str, Any]:
        if self.critic is None:
            return {}
        return {"critic": self.critic.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._make().load_state_dict(state["critic"])
        self.second.load_state_dict(state["second"])


class FillsLate(MakesLate):
    """Fills what a resume does not have yet."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.critic is not None
        self.critic.load_state_dict(state["critic"])
        self.second.load_state_dict(state["second"])


def test_what_is_made_late_and_made_again_by_loading_is_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(MakesLate, tmp_path / "told", capfd) == []
    assert str(judge(Case(), tmp_path / "exact", MakesLate)) == "exact"
    verdict = judge(Case(), tmp_path / "fills", FillsLate)
    assert verdict.refused_at == 2 and "failed with AssertionError" in (verdict.refused or ""), verdict


class Collects(ZooTask):
    """Its state has a list of what is in a set, and a list of what is in a data frame."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.seen: set[int] = set()
        self.frame = Frame([1.0])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.seen.add(len(self.seen))
        self.frame = Frame([*self.frame.rows, 1.0 + len(self.seen)])
        return super().loss(model, batch) * len(self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": sorted(self.seen),
            "frame": {str(number): [row] for number, row in enumerate(self.frame.rows)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.clear()
        self.seen.update(state["seen"])
        self.frame = Frame([row for [row] in state["frame"].values()])


class Frame:
    """A data frame, of which only an array is looked at."""

    def __init__(self, rows: list[float]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Frame:
        return Frame(self.rows[rows])

    def to_numpy(self) -> Any:
        return np.array(self.rows)


class CollectsSome(Collects):
    """Its state has only some of it."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": sorted(self.seen)[:1],
            "frame": {str(number): [row] for number, row in enumerate(self.frame.rows[:2])},
        }


def test_a_set_that_comes_back_from_a_list_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Collects, tmp_path / "all", capfd) == []
    assert told(CollectsSome, tmp_path / "some", capfd) == ["task.frame", "task.seen"]


class Draws(ZooTask):
    """Draws numbers from a set, in the order in which it has them."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.pool = {0, 8}  # which have the same place

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.pool = {8, 0} if next(iter(self.pool)) == 0 else {0, 8}
        return super().loss(model, batch) * (1 + next(iter(self.pool)))

    def state_dict(self) -> dict[str, Any]:
        return {"pool": [self.pool]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        [self.pool] = state["pool"]


class DrawsSome(Draws):
    """Takes some of many away, so that those that stay have another order than they had without these."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.pool = set(range(100))
        for number in {*range(100)} - {2, 65}:
            self.pool.discard(number)
        return ZooTask.loss(self, model, batch)


def test_a_set_is_told_if_its_order_does_not_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Draws, tmp_path / "same", capfd) == []
    assert str(judge(Case(), tmp_path / "exact", Draws)) == "exact"
    assert told(DrawsSome, tmp_path / "other", capfd) == ["the order of task.pool.0"]


class HasClock(ZooTask):
    """Saves for how long it has trained."""

    start, before = time.time(), 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.before + time.time() - self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.start = state["seconds"], time.time()


def test_a_clock_in_the_state_is_refused_as_such(tmp_path: Path) -> None:
    assert "returns different values each time it is called: seconds" in str(judge(Case(), tmp_path, HasClock))


class HasArray(ZooTask):
    """Has an array of a type that torch does not know."""

    def __init__(self, dtype: str, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.array = np.ones(3, dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array}


@pytest.mark.parametrize("dtype", [">f4", "longdouble"])
def test_an_array_that_torch_does_not_know_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, partial(HasArray, dtype))
    assert "task.array is an array of" in (verdict.refused or ""), verdict


class KeepsHost(ZooTask):
    """Its state says, among other things, where it was saved; and a number that loading leaves out."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.offset = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step >= 3:
            self.offset = 5
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"info": {"host": f"node-{self.crash}"}, "place": {"offset": self.offset}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offset = 0 if type(self) is KeepsHost else state["place"]["offset"]


class LoadsAll(KeepsHost):
    """Loads the number, too."""


def test_words_in_the_state_may_differ_on_another_node_and_numbers_may_not(tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path / "forgets", KeepsHost)
    assert verdict.refused_at is None and '"offset": 5' in (verdict.refused or ""), verdict
    assert str(judge(Case(), tmp_path / "loads", LoadsAll)) == "exact"
