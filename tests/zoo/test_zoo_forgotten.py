"""What a task forgets to save is told, also where its values are in the state by chance, or only a name has moved."""

from __future__ import annotations

import concurrent.futures
import datetime
import enum
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import Dataset, TensorDataset
from zoo_models import CLASSES, FEATURES, mlp
from zoo_training import Case, ZooTask, judge

_SHORT = {"steps": 3, "ema_decay": None}


def _told(make: Any, folder: Path, capfd: pytest.CaptureFixture[str], **train: Any) -> list[str]:
    """The names that a calm training warns of, besides what every task of the zoo forgets."""
    judge(Case(train={**_SHORT, **train}), folder, make)
    said = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    listed = [line.partition("training changes ")[2].partition(", which")[0].split(", ") for line in said]
    return sorted({name for names in listed for name in names} - {"task.losses"})


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
    assert _told(TakesTurns, tmp_path, capfd) == ["task.other_turn", "task.rounds", "task.turn"]


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
    assert _told(GoesOn, tmp_path / "forgets", capfd) == ["task.criterion", "task.level", "task.level_saved"]
    assert _told(SavesNumber, tmp_path / "saves", capfd) == []


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
        self.delta = torch.zeros(FEATURES, requires_grad=True)

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
    assert _told(StopsTau, tmp_path / "stops", capfd) == ["task.tau"]
    assert _told(LearnsTau, tmp_path / "learns", capfd) == []
    assert _told(MadeApart, tmp_path / "apart", capfd) == []
    assert _told(Scales, tmp_path / "scales", capfd, steps=8) == []


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
    assert _told(FillsBoth, tmp_path / "both", capfd) == []
    assert str(judge(Case(), tmp_path / "exact", FillsBoth)) == "exact"


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
    assert _told(ReadsFile, tmp_path, capfd) == ["task.lines"]


class Sets:
    """A value that is kept by the class."""

    value = 0

    def __get__(self, instance: object, owner: type) -> int:
        return self.value

    def __set__(self, instance: object, value: int) -> None:
        self.value = value


class Helper:
    pass


class Elsewhere(ZooTask):
    """Keeps numbers in places of many kinds."""

    __slots__ = ("in_slot",)
    described = Sets()

    class Settings:
        seen = 0

    @staticmethod
    def counted(memory: list[int] = [0]) -> None:  # noqa: B006
        memory[0] += 1

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.in_slot, self.day = 0, datetime.date(2026, 1, 1)
        self.future = concurrent.futures.Future[int]()
        self.cache, self.by_name = Helper(), importlib.import_module("zoo_by_name")

    def model(self) -> nn.Module:
        self.other = nn.Linear(FEATURES, 1)
        uses = [0]

        def count(_: Tensor) -> None:
            uses[0] += 1

        self.other.weight.register_hook(count)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.in_slot, self.described = self.in_slot + 1, self.described + 1
        self.Settings.seen += 1
        self.counted()
        self.day += datetime.timedelta(days=1)
        self.future = concurrent.futures.Future()
        self.cache.length = getattr(self.cache, "length", 0) + 1  # type: ignore[attr-defined]
        self.by_name.count()
        torch.use_deterministic_algorithms(True)
        return super().loss(model, batch) + 0.0 * self.other(batch[0]).mean()


def test_numbers_in_places_of_many_kinds_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo_by_name.py").write_text("CALLS = 0\n\n\ndef count():\n    global CALLS\n    CALLS += 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Helper, "__module__", "transformers.cache_utils")
    monkeypatch.setattr("cluster_ddp.train.saving._SHOWN", 20)
    try:
        told = _told(Elsewhere, tmp_path / "runs", capfd)
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [
        "Elsewhere.counted", "Elsewhere.described", "Settings.seen", "task.cache", "task.day", "task.future",
        "task.in_slot", "task.other", "the settings of torch", "zoo_by_name.CALLS",
    ]  # fmt: skip


class HooksAll(ZooTask):
    """Counts in a hook of all modules."""

    def model(self) -> nn.Module:
        seen = 0

        def count(*_: Any) -> None:
            nonlocal seen
            seen += 1

        self.handle = nn.modules.module.register_module_forward_hook(count)
        return super().model()


def test_what_hooks_of_all_modules_keep_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        assert _told(HooksAll, tmp_path, capfd) == ["the hooks of all modules"]
    finally:
        nn.modules.module._global_forward_hooks.clear()


class Accumulates(ZooTask):
    """Adds up gradients of a critic over several steps; those of another network are new in each."""

    def model(self) -> nn.Module:
        self.critic, self.judge, self.unread = (nn.Linear(CLASSES, 1) for _ in range(3))
        self.second = Adam([*self.critic.parameters(), *self.judge.parameters()])
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.judge.zero_grad()
        for network in (self.critic, self.judge, self.unread):
            network(torch.ones(CLASSES)).sum().backward()
        return super().loss(model, batch)


def test_gradients_that_add_up_over_steps_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _told(Accumulates, tmp_path, capfd) == ["task.critic"]


class Relabels(ZooTask):
    """Changes the labels of a set of tensors, of which several batches are fetched together."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(48, FEATURES, generator=generator)
        self.array = np.zeros(48, np.int64)
        self.labels = torch.zeros(48, dtype=torch.int64)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(self.inputs, self.labels, torch.arange(48))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels, indices = batch
        self.labels[indices] = (labels + 1) % CLASSES
        self.labels[indices // 2] = 0
        return super().loss(model, (inputs, labels))

    def state_dict(self) -> dict[str, Any]:
        return {"labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels.copy_(state["labels"])


class RelabelsArray(Relabels):
    """Changes them by an array."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.labels = torch.from_numpy(self.array)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels, indices = batch
        self.array[(indices // 2).numpy()] += 1
        return ZooTask.loss(self, model, (inputs, labels % CLASSES))


@pytest.mark.parametrize("kind", [Relabels, RelabelsArray])
def test_batches_are_not_fetched_before_their_labels_change(kind: type[ZooTask], tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, kind)) == "exact"


class Widens(ZooTask):
    """Its batches become wider."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.width = self.steps = 1

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = super().collate(items)
        return self._cut(inputs), labels

    def _cut(self, inputs: Tensor) -> Tensor:
        return inputs * (torch.arange(FEATURES) < self.width)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        self.width = min(FEATURES, self.steps)
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"width": self.width, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.width, self.steps = state["width"], state["steps"]


def test_what_collate_reads_in_workers_and_training_changes_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "training changes Widens.width, from which samples or batches are made, but workers have copies"
    assert str(judge(Case(), tmp_path / "here", Widens)) == "exact"
    assert words not in capfd.readouterr().err
    judge(Case(train={**_SHORT, "workers": 1}), tmp_path / "workers", Widens)
    assert words in capfd.readouterr().err


class Scripted(ZooTask):
    """Its model has a scripted part."""

    def model(self) -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Linear(FEATURES, 4)), nn.Linear(4, CLASSES))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_are_refused_by_name(tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, Scripted)
    assert verdict.refused_at == -1 and "'0' of model() is a scripted module" in (verdict.refused or ""), verdict
