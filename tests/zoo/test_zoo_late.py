"""What is forgotten and shows only in later steps is exact, refused, or told by name."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate
from train_ranks import run_ranks
from zoo_models import CLASSES, FEATURES, device
from zoo_told import SHORT, told
from zoo_training import Case, ZooTask, judge


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and labels, not of the module of data sets: what other tests have begun there would be told."""
    inputs = torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(3))
    return inputs, inputs[:, 0].gt(0).long() + inputs[:, 1].gt(0.5).long()


TEACHER = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))


class Window:
    """Keeps the last steps."""

    def __init__(self) -> None:
        self.steps = collections.deque[int](maxlen=3)


def _lists() -> collections.defaultdict[int, list[int]]:
    return collections.defaultdict(lambda: [])


class LosesALimit(ZooTask):
    """After a resume, its window has no limit, and its weights have another default, which shows only later."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.window, self.weights, self.lists = Window(), collections.defaultdict[int, float](lambda: 1.0), _lists()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        self.window.steps.append(self.trainer.step)
        return super().loss(model, batch) * len(self.window.steps) * self.weights[self.trainer.step]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.window.steps), "weights": list(self.weights.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.steps = collections.deque(state["steps"])
        self.weights = collections.defaultdict(float, enumerate(state["weights"]))
        self.lists = collections.defaultdict(list)  # makes the same


def test_the_limit_of_a_window_and_the_default_of_a_dict_have_to_come_back(tmp_path: Path) -> None:
    refused = judge(Case(), tmp_path, LosesALimit).refused
    assert refused is not None
    assert "task.window.steps: a deque with maxlen=3 comes back as something else" in refused
    assert "task.weights: a defaultdict comes back with a different default" in refused and "task.lists" not in refused


NUMBERS = (number for number in itertools.count())
next(NUMBERS)  # used before training only: no step names it


class ChangesLate(ZooTask):
    """When it changes, the state has the same values elsewhere."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.number = next(NUMBERS)
        self.bad, self.hard, self.level, self.warm = 0, False, 7, True
        self.is_worse = self.is_frozen = False
        self.memory = Memory()
        self.average: nn.Module | None = None
        self.steps = self.steps_of_epoch = self.begun = 0
        self.sizes, self.size = {"first": 128, "then": 256}, 128
        self.memories = {"first": Memory(), "then": Memory()}
        self.chosen, self.stages = self.memories["first"], [Memory()]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 2:
            self.bad, self.hard, self.level, self.warm, self.begun = 1, True, 1, False, np.int64(1)
            self.is_worse = self.is_frozen = True
            self.memory.place = 3
            self.size, self.chosen = self.sizes["then"], self.memories["then"]
            self.new_size, self.stages[0].place = self.sizes["then"], 1
            self.average = nn.Linear(FEATURES, CLASSES)
        self.steps += 1
        self.steps_of_epoch = self.steps % 3  # the same in the first two steps, and so loaded correctly then
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        average = {} if self.average is None else self.average.state_dict()
        return {
            "bad": self.bad,
            "warm": int(self.warm),
            "stage": int(self.is_frozen),
            "average": average,
            "steps": self.steps,
            "epoch": self.steps // 3,
            "sizes": self.sizes,
            "names": list(self.sizes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad, self.warm = state["bad"], bool(state["warm"])
        self.is_worse, self.is_frozen, self.memory.place = self.bad > 0, state["stage"] == 1, 3 * self.bad
        self.steps = self.steps_of_epoch = state["steps"]
        if state["average"]:
            self.average = nn.Linear(FEATURES, CLASSES)
            self.average.load_state_dict(state["average"])


def test_a_late_flag_or_number_that_is_in_the_state_by_chance_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster_ddp.train.checks.unsaved.MAX_NAMES", 10)
    assert told(ChangesLate, tmp_path, capfd) == [
        "task.begun", "task.chosen", "task.hard", "task.level", "task.new_size", "task.size", "task.stages",
        "task.steps_of_epoch",
    ]  # fmt: skip


class Plays(ZooTask):
    """Keeps states with those that follow them, most of which are the same tensors, and detaches one in the next step.

    Both is usual for a memory of episodes and for hidden states; so are places with 0 in them until they are filled,
    and an object that has its tensors only since the first step.
    """

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.hidden, self.moves = torch.zeros(()), collections.deque[list[Tensor]](maxlen=4)
        self.slots, self.buffer = np.zeros(9, dtype=object), SimpleNamespace(count=0)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        self.hidden = self.hidden.detach()
        for move in range(2 * self.trainer.step, 2 * self.trainer.step + 2):
            begins = not self.moves or move % 3 == 0
            self.moves.append([torch.randn(2) if begins else self.moves[-1][1], torch.randn(2)])
        loss = super().loss(model, batch) + self.hidden
        self.hidden = loss / 2
        self.slots[self.buffer.count] = (torch.randn(2), self.buffer.count)
        self.buffer.count += 1
        self.buffer.inputs = batch[0]
        return loss

    def state_dict(self) -> dict[str, Any]:
        slots, own = [slot and list(slot) for slot in self.slots], vars(self.buffer)
        return {"hidden": self.hidden, "played": [list(move) for move in self.moves], "slots": slots, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hidden, self.moves = state["hidden"], collections.deque(state["played"], maxlen=4)
        for number, slot in enumerate(state["slots"]):
            self.slots[number] = slot and tuple(slot)
        vars(self.buffer).update({key: state[key] for key in ("count", "inputs") if key in state})


def test_episodes_and_hidden_states_in_the_state_are_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(Plays, tmp_path, capfd) == []


class FromTeacher(ZooTask):
    """Learns from a network that no object holds, and that steps put into evaluation mode."""

    def model(self) -> nn.Module:
        TEACHER.train().requires_grad_(False).to(device())
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 2:
            TEACHER.eval()
        return super().loss(model, batch) + TEACHER(batch[0]).abs().mean() * super().loss(model, batch)


class ByTeaching(ZooTask):
    """The same, by a function that holds the network."""

    def model(self) -> nn.Module:
        teacher = nn.Dropout()
        self.teach = lambda inputs: teacher(inputs).abs().mean()
        self.stop = teacher.eval
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 2:
            self.stop()
        return super().loss(model, batch) * (1 + self.teach(batch[0]))


class HidesTeacher(ByTeaching):
    """The same, where the model hides the network from its state_dict()."""

    def model(self) -> nn.Module:
        model = ZooTask.model(self)
        model.hidden = [nn.Dropout()]  # type: ignore[assignment]
        self.teach = lambda inputs: model.hidden[0](inputs).abs().mean()  # type: ignore[index]
        self.stop = lambda: model.hidden[0].eval()  # type: ignore[index]
        return model


@pytest.mark.parametrize("kind", [FromTeacher, ByTeaching, HidesTeacher])
def test_the_mode_of_a_network_outside_the_model_comes_back(kind: type[ZooTask], tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, kind)) == "exact"


class DropsAKey(ZooTask):
    """Its state has something only later, which it does not take back."""

    threshold: float | None = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 2:
            self.threshold = 0.5
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.threshold is None else {"threshold": self.threshold}


def test_a_part_of_the_state_that_is_gone_after_loading_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(Case(), tmp_path, DropsAKey)
    assert "the checkpoint holds threshold of the task, which state_dict() does not return" in capfd.readouterr().err


class Relabels(ZooTask):
    """Its set has other labels in each attempt, but for the last and the first few."""

    times = 0

    def train_data(self) -> Dataset[Any]:
        inputs, labels = samples()
        if Relabels.times:
            labels[10:20] = (labels[10:20] + 1) % CLASSES
        Relabels.times += 1
        return TensorDataset(inputs, labels)


def test_labels_that_are_drawn_anew_in_each_attempt_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(Case(), tmp_path, Relabels)
    assert "a sample of train_data() has changed since the checkpoint was saved" in capfd.readouterr().err


class Memory:
    """Holds a few numbers."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.place = 0


MEMORY = Memory()


class LoadsLittle(ZooTask):
    """Its load_state_dict() starts over with what it does not save, in objects that the check shares with the task."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.memory, self.places, self.bag = Memory(), dict[int, int](), SimpleNamespace(place=0)
        self.counted: list[tuple[int, ...]] = []
        MEMORY.__init__()  # type: ignore[misc]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        memories = (self.memory, MEMORY, self.bag)
        for memory in memories:
            memory.place += 1
        for memory in (self.memory, MEMORY):
            memory.numbers.append(memory.place)
        self.places[self.memory.place] = MEMORY.place
        self.counted.append((len(self.places), *(memory.place for memory in memories), *self.memory.numbers))
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.memory.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places.clear()
        self.memory.numbers[:], self.memory.place = state["numbers"], 0
        MEMORY.numbers, MEMORY.place, self.bag.place = state["numbers"], 0, 0


def counted(folder: Path) -> list[tuple[int, ...]]:
    tasks: list[LoadsLittle] = []

    def make(case: Case, crash: int | None = None) -> LoadsLittle:
        tasks.append(LoadsLittle(case, crash))
        return tasks[-1]

    judge(Case(train=SHORT), folder, make, crashes=())
    return tasks[0].counted


def test_a_check_leaves_the_objects_of_the_task_as_they_are(tmp_path: Path) -> None:
    (found,) = run_ranks(counted, 1, tmp_path)  # where no test before has left a thread of its own
    assert [numbers[:4] for numbers in found] == [(number,) * 4 for number in (1, 2, 3)]
    assert found[-1][4:] == (1, 2, 3)


class SumsUp(ZooTask):
    """Its next step uses up what its evaluation has left, which adds noise to samples as well."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.sum, self.level, self.noise = 0.0, 1.0, 0

    def train_data(self) -> Dataset[Any]:
        self.noisier = Noisier()
        return self.noisier

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = default_collate(items)
        return inputs + self.noise, labels

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(*samples())

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, labels = batch
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        self.sum += float(losses.sum())
        self.noisier.level = self.noise = 1
        return {"loss": losses}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.sum:
            self.level, self.sum = self.sum, 0.0
        return super().loss(model, batch) * self.level

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


def test_what_an_evaluation_leaves_for_the_next_step_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(SumsUp, tmp_path, capfd, evaluate_every=2) == ["task.noise", "task.noisier", "task.sum"]


class Noisier(Dataset[Any]):
    """Adds as much noise as it is told to."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples()
        self.level = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + self.level * torch.randn(FEATURES), self.labels[index]


class RaisesLevel(ZooTask):
    """Saves the level of its set, which it raises within the first pass, after the first steps."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.data = Noisier()

    def train_data(self) -> Dataset[Any]:
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 4:
            self.data.level += 1
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.data.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.level = state["level"]


def test_a_level_that_the_state_holds_may_rise_within_the_first_pass(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert str(judge(Case(), tmp_path, RaisesLevel)) == "exact"
    assert "after a pass" not in capfd.readouterr().err


class AsksOnce(ZooTask):
    """Sets something in the last step of every three, which the next one uses up."""

    pending = False

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        factor = 2 if self.pending else 1
        self.pending = self.trainer.step % 3 == 2
        return super().loss(model, batch) * factor


def test_what_is_there_only_when_a_checkpoint_is_saved_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(AsksOnce, tmp_path, capfd, steps=5) == ["task.pending"]
