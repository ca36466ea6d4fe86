"""Tensors that a task trains by itself: what their optimizer would lose is refused, and freezing them is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import Dataset
from zoo_models import CLASSES, FEATURES, device
from zoo_told import told
from zoo_training import Case, ZooTask, judge


class Quantizes(ZooTask):
    """Keeps quantized scores and a nested tensor, which torch cannot view as other numbers."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.scores, self.same = (_quantized(torch.zeros(3)) for _ in range(2))
        self.nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.scores, self.same = _quantized(self.scores.dequantize() + 1.0), _quantized(torch.zeros(3))
        self.nested = torch.nested.nested_tensor([torch.ones(1)])
        return super().loss(model, batch)


def _quantized(numbers: Tensor) -> Tensor:
    return torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*(quantize|nested)")
def test_quantized_and_nested_tensors_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(Quantizes, tmp_path, capfd) == ["task.nested", "task.scores"]


class LearnsTau(ZooTask):
    """Has a temperature of its own, which a second optimizer updates."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.tau = nn.Parameter(torch.ones(()))
        self.second = Adam([self.tau], lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.second.zero_grad()
        (super().loss(model, batch).detach() * self.tau).backward()
        self.second.step()
        return super().loss(model, batch) * self.tau.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"tau": self.tau, "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.tau.copy_(state["tau"])
        self.second.load_state_dict(state["second"])


class ReplacesTau(LearnsTau):
    """After a resume, its optimizer updates what nothing else refers to."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tau = nn.Parameter(state["tau"])
        self.second.load_state_dict(state["second"])


class ReplacesBoth(ReplacesTau):
    """Makes the optimizer again, too."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tau = nn.Parameter(state["tau"])
        self.second = Adam([self.tau], lr=0.1)
        self.second.load_state_dict(state["second"])


class Scales(LearnsTau):
    """Has a scaler for its second optimizer, whose state has numbers where it has tensors."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = ZooTask.loss(self, model, batch)
        self.second.zero_grad()
        self.scaler.scale(loss.detach() * self.tau).backward()
        self.scaler.step(self.second)
        self.scaler.update()
        return loss * self.tau.detach()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.scaler.load_state_dict(state["scaler"])


class MadeApart(ZooTask):
    """Makes a critic in model(), and what holds it in train_data(), which no check calls again."""

    def model(self) -> nn.Module:
        self.critic = nn.Linear(CLASSES, 1)
        return super().model()

    def train_data(self) -> Dataset[Any]:
        self.second = Adam(self.critic.parameters(), lr=0.1)
        self.kept = SimpleNamespace(critic=self.critic)
        return super().train_data()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.second.zero_grad()
        self.kept.critic(torch.ones(CLASSES)).sum().backward()
        self.second.step()
        return super().loss(model, batch) * self.critic.weight.detach().mean()

    def state_dict(self) -> dict[str, Any]:
        return {"critic": self.critic.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.critic.load_state_dict(state["critic"])
        self.second.load_state_dict(state["second"])


class StopsTau(LearnsTau):
    """Stops learning it, which nothing saves."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch) if self.tau.requires_grad else ZooTask.loss(self, model, batch)
        self.tau.requires_grad_(False)
        return loss


class Perturbs(ZooTask):
    """Comes back with a perturbation that requires no gradient any more."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.delta = torch.zeros(FEATURES, requires_grad=True, device=device())

    def state_dict(self) -> dict[str, Any]:
        return {"delta": self.delta.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.delta = state["delta"]


def test_a_tensor_that_its_optimizer_would_lose_is_refused(tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path / "copies", LearnsTau)) == "exact"
    assert str(judge(Case(), tmp_path / "makes both", ReplacesBoth)) == "exact"
    assert str(judge(Case(), tmp_path / "made apart", MadeApart)) == "exact"
    for kind, words in ((ReplacesTau, "task.tau: "), (Perturbs, "task.delta: requires a gradient now")):
        verdict = judge(Case(), tmp_path / kind.__name__, kind)
        assert verdict.refused_at == 2 and words in (verdict.refused or ""), verdict


def test_a_tensor_that_is_frozen_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(StopsTau, tmp_path / "stops", capfd) == ["task.tau"]
    assert told(LearnsTau, tmp_path / "learns", capfd) == []
    assert told(MadeApart, tmp_path / "apart", capfd) == []
    assert told(Scales, tmp_path / "scales", capfd, steps=8) == []


class UpdatesNext(LearnsTau):
    """Its second optimizer uses in each step the gradients that the trainer has computed in the one before."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.second.step()
        self.second.zero_grad()
        return ZooTask.loss(self, model, batch) * self.tau


class PerturbsNext(Perturbs):
    """Follows by itself the gradient of the step before."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.delta.grad is not None:
            with torch.no_grad():
                self.delta += 0.1 * self.delta.grad.sign()
            self.delta.grad = None
        return super().loss(model, (batch[0] + self.delta, batch[1]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.delta.copy_(state["delta"])


class PerturbsAtOnce(PerturbsNext):
    """Follows that of the same step."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        ZooTask.loss(self, nn.Flatten(), (self.delta + inputs, labels % FEATURES)).backward()
        super().loss(model, batch)
        return ZooTask.loss(self, model, (inputs + self.delta.detach(), labels))


def test_gradients_that_the_next_step_uses_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(UpdatesNext, tmp_path / "optimizer", capfd) == ["the gradients in task.tau"]
    assert told(PerturbsNext, tmp_path / "by itself", capfd) == ["the gradients in task.delta"]
    assert told(PerturbsAtOnce, tmp_path / "at once", capfd) == []


class MarksWeight(ZooTask):
    """Keeps a number in its first parameter, under a name that torch has for buffers."""

    def model(self) -> nn.Module:
        self.first = next((model := super().model()).parameters())
        self.first.persistent = 1.0  # type: ignore[attr-defined]
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.first.persistent += 0.1  # type: ignore[attr-defined]
        return super().loss(model, batch)


def test_a_number_in_a_parameter_is_told_whatever_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(MarksWeight, tmp_path, capfd) == ["model.0.weight.persistent"]


class KeepsSpectrum(ZooTask):
    """Saves what it has last seen, as a conjugated or a nested tensor."""

    seen: Any = torch.zeros(3, dtype=torch.cfloat).conj()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        step = self.seen.real.mean() + 1
        self.seen = torch.full((3,), complex(step, step)).conj()
        loss = super().loss(model, batch)
        return tuple(part * step for part in loss) if isinstance(loss, tuple) else loss * step

    def state_dict(self) -> dict[str, Any]:
        is_nested = self.case.loss == "(sum, weight)"
        return {"seen": torch.nested.nested_tensor([self.seen.real]) if is_nested else self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class KeepsDirections(ZooTask):
    """Finds directions, and turns a teacher, which then lie in memory column by column; what is loaded is copied."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.directions, self.teacher = torch.eye(FEATURES), nn.Linear(FEATURES, FEATURES).requires_grad_(False)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        self.directions, self.teacher = self.directions.to(inputs.device), self.teacher.to(inputs.device)
        self.directions = torch.linalg.eigh(self.directions + inputs.T @ inputs)[1]
        self.teacher.weight.data = self.teacher.weight.data.T.contiguous().T
        return super().loss(model, (self.teacher(inputs @ self.directions), labels))

    def state_dict(self) -> dict[str, Any]:
        return {"directions": self.directions, "teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.directions.copy_(state["directions"])
        self.teacher.load_state_dict(state["teacher"])


@pytest.mark.parametrize("task", [KeepsSpectrum, KeepsDirections])
def test_a_conjugated_or_turned_tensor_in_the_state_comes_back(task: type[ZooTask], tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, task)) == "exact"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_in_the_state_is_refused(tmp_path: Path) -> None:
    verdict = judge(Case(loss="(sum, weight)"), tmp_path, KeepsSpectrum)
    assert "task.seen is a nested tensor" in (verdict.refused or ""), verdict
