"""What training changes is told by name also where no attribute, version or module of the task shows it."""

from __future__ import annotations

import collections
import copy
import importlib
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo_elsewhere
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset
from zoo_elsewhere import Doubles, in_attribute, in_closure, in_default
from zoo_models import device, mlp
from zoo_training import Case, ZooTask, judge

from cluster_ddp.train.objects.whose_code import is_of_user

_SHORT = {"steps": 3, "ema_decay": None}


def _told(make: Any, folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    judge(Case(train=_SHORT), folder, make)
    said = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    return said[0].partition("training changes ")[2].partition(", which")[0]


class CountsInHelpers(ZooTask):
    """Its loss depends on what functions and a class of another module count."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        zoo_elsewhere.levels["noise"] += 1.0
        return Doubles.apply(super().loss(model, batch)) * in_attribute() * in_default() * in_closure()


def test_what_helpers_of_the_user_count_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    named = "Doubles.calls, task.losses, zoo_elsewhere.in_attribute, zoo_elsewhere.in_closure, zoo_elsewhere.in_default"
    assert _told(CountsInHelpers, tmp_path, capfd) == f"{named} and 1 more"


class FollowsByData(ZooTask):
    """Its teacher and its totals follow by ``.data`` and ``.numpy()``, which torch does not count as changes."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.totals, self.large, self.constant = torch.zeros(3), torch.zeros(1 << 19), torch.zeros(3)

    def model(self) -> nn.Module:
        model = mlp()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        for mine, theirs in zip(self.teacher.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data.cpu(), alpha=0.1)
        self.totals.numpy()[1] += 1.0
        self.large.data += 1.0
        return super().loss(model, batch)


def test_what_changes_by_data_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _told(FollowsByData, tmp_path, capfd) == "task.large, task.losses, task.teacher, task.totals"


class TellsWorkers(ZooTask):
    """Its levels are where its workers see them, one of them held by the data set."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.level, self.levels = multiprocessing.Value("i", 0), multiprocessing.RawArray("d", [0.0, 0.0])
        self.constant = multiprocessing.Value("i", 0)
        self.chain = collections.ChainMap({"level": 0})
        self.data = TensorDataset(torch.zeros(3))
        self.data.level = multiprocessing.Value("i", 0)  # type: ignore[attr-defined]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.level.value += 1  # type: ignore[attr-defined]
        self.levels[1] += 1.0
        self.chain["level"] += 1
        self.data.level.value += 1  # type: ignore[attr-defined]
        return super().loss(model, batch)


def test_numbers_in_shared_memory_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _told(TellsWorkers, tmp_path, capfd) == "task.chain, task.data, task.level, task.levels, task.losses"


class Swaps(ZooTask):
    """Two layers take turns as the teacher of the other, by names and in a list that a resume begins again."""

    def model(self) -> nn.Module:
        model = mlp()
        self.pupil, self.teacher = self.in_turn = [model[0], model[2]]
        self.constant = model[0]
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 1:
            self.pupil, self.teacher = self.teacher, self.pupil
            self.in_turn.reverse()
        return super().loss(model, batch)


def test_networks_that_change_places_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _told(Swaps, tmp_path, capfd) == "task.in_turn, task.losses, task.pupil, task.teacher"


class MarksTensors(ZooTask):
    """Keeps numbers in attributes of a parameter, of a buffer and of a tensor of its own."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.mean = torch.zeros(3)

    def model(self) -> nn.Module:
        self.net = mlp()
        self.net.register_buffer("seen", torch.zeros(3))
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Any:
        for tensor in (self.net[0].weight, self.net.seen, self.mean):
            tensor.uses = getattr(tensor, "uses", 0) + 1  # type: ignore[union-attr]
        return super().loss(model, batch)


def test_attributes_of_tensors_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _told(MarksTensors, tmp_path, capfd) == "model.0.weight.uses, model.seen.uses, task.losses, task.mean"


class SavesOtherwise(ZooTask):
    """Gives what it keeps to the checkpoint in another form, and steps a second optimizer in a hook of the first."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.array, self.listed, self.number, self.scale = np.ones(3, np.float32), np.ones(3), 1, torch.ones(())
        self.rate, self.in_place = np.float64(0.1), np.ones(3)

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        made = super().optimizer(model, lr)
        self.second = SGD([self.scale], lr=0.01, momentum=0.5)
        made.register_step_post_hook(lambda *_: self.second.step())
        return made

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.array, self.listed, self.number = self.array * 1.5, self.listed * 1.5, self.number + 1
        self.scale.grad = torch.tensor(0.1 * self.number)
        self.rate = self.rate * np.exp(0.1)
        self.in_place *= 1.1
        return super().loss(model, batch) * float(
            self.array[0] + self.listed[0] + self.scale + self.rate + self.in_place[0]
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "array": torch.from_numpy(self.array),
            "in place": torch.from_numpy(self.in_place),
            "listed": self.listed.tolist(),
            "number": torch.tensor(self.number),
            "scale": self.scale,
            "rate": float(self.rate),
            "second": self.second.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array, self.listed = state["array"].numpy(), np.array(state["listed"])
        self.number, self.rate = int(state["number"]), np.float64(state["rate"])
        self.in_place[:] = state["in place"].numpy()
        with torch.no_grad():
            self.scale.copy_(state["scale"])
        self.second.load_state_dict(state["second"])


def test_what_is_saved_in_another_form_is_exact_and_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(), tmp_path, SavesOtherwise)) == "exact"
    said = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert all("training changes task.losses, which" in line for line in said) and said


class SetsModes(ZooTask):
    """Once, it puts a teacher into evaluation mode and freezes a part of a critic, both kept beside its model."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.bound: dict[str, Any] | None = None

    def model(self) -> nn.Module:
        self.teachers = [nn.Sequential(nn.Dropout(0.5), mlp()).to(device())]
        self.kept = SimpleNamespace(critic=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device()))
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        [teacher], critic = self.teachers, self.kept.critic
        if self.trainer.step == 1:
            teacher.eval()
            critic[0].requires_grad_(False)
        if self.trainer.step == 2:
            self.bound = {"of": [torch.ones(1)]}
        inputs, _ = batch
        asked = [weight for weight in critic.parameters() if weight.requires_grad]
        slopes = torch.autograd.grad(critic(teacher(inputs)).mean(), asked)
        with torch.no_grad():
            for weight, slope in zip(asked, slopes, strict=True):
                weight.add_(slope, alpha=-0.1)
        return super().loss(model, batch) + critic(model(inputs)).mean() + teacher(inputs).mean()

    def state_dict(self) -> dict[str, Any]:
        return {"critic": self.kept.critic.state_dict(), "bound": self.bound}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept.critic.load_state_dict(state["critic"])
        self.bound = state["bound"]


def test_the_modes_of_networks_beside_the_model_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(), tmp_path, SetsModes)) == "exact"
    assert "task.bound" not in capfd.readouterr().err


class CountsModels(ZooTask):
    """Counts how often its model is made."""

    made_so_far = np.zeros(1)  # a check undoes what it changes, but for what is in an array

    def model(self) -> nn.Module:
        CountsModels.made_so_far += 1
        return super().model()


def test_what_only_the_check_changes_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _told(CountsModels, tmp_path, capfd) == "task.losses"
    assert CountsModels.made_so_far > 1


def test_what_pip_has_put_into_a_folder_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("mine", "my_helpers"), ("theirs", "their_helpers")):
        (tmp_path / folder / name).mkdir(parents=True)
        for file in ("__init__.py", "inner.py"):
            (tmp_path / folder / name / file).touch()
        monkeypatch.syspath_prepend(tmp_path / folder)
        importlib.import_module(f"{name}.inner")
    (tmp_path / "theirs" / "their_helpers-1.0.dist-info").mkdir()
    names = [f"{package}{inner}" for package in ("my_helpers", "their_helpers") for inner in ("", ".inner")]
    assert [is_of_user(name) for name in names] == [True, True, False, False]
