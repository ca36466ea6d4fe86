"""What samples and batches are made from, and training changes: exact, or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from zoo_models import CLASSES, FEATURES
from zoo_told import SHORT, told
from zoo_training import Case, ZooTask, judge


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
        indices = indices.cpu()
        self.labels[indices] = (labels.cpu() + 1) % CLASSES
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
        self.array[(indices // 2).cpu().numpy()] += 1
        return ZooTask.loss(self, model, (inputs, labels % CLASSES))


@pytest.mark.parametrize("kind", [Relabels, RelabelsArray])
def test_batches_are_not_fetched_before_their_labels_change(kind: type[ZooTask], tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, kind)) == "exact"


class RelabelsLate(Relabels):
    """Changes the first labels in its fifth step only, and keeps a number that nothing replaces."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.number = 1

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == 4:
            self.number += 1
            self.labels[:40] = 1
        return ZooTask.loss(self, model, batch[:2])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.number = state["number"]


class ReplacesLabels(RelabelsLate):
    """After a resume, the data set holds other labels than the task; each holds a view."""

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(self.inputs, self.labels.view(-1), torch.ones(48))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels, self.number = state["labels"], state["number"]


def test_labels_that_a_resume_replaces_are_told_when_they_first_change(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "training changes TensorDataset.tensors, from which samples or batches are made, but load_state_dict()"
    assert str(judge(Case(), tmp_path / "filled", RelabelsLate)) == "exact"
    assert words not in capfd.readouterr().err
    assert not judge(Case(), tmp_path / "replaced", ReplacesLabels).exact
    assert capfd.readouterr().err.count(words) >= 2  # at the end of the calm training, and at the last resume


class Level:
    """How far samples are moved."""

    def __init__(self, far: float) -> None:
        self.far = far


class Moved(Dataset[Any]):
    def __init__(self, level: Level) -> None:
        self.level = level

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        return torch.full((FEATURES,), self.level.far + 0.01 * index), index % 3


class MovesLate(ZooTask):
    """Goes on to another level in its fifth step only."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.level = Level(1.0)

    def train_data(self) -> Dataset[Any]:
        return Moved(self.level)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        self.level.far = 1.0 if self.trainer.step < 4 else 2.0
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"far": self.level.far}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level.far = state["far"]


class ReplacesLevel(MovesLate):
    """After a resume, the data set holds another level than the task."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = Level(state["far"])


def test_an_object_that_a_resume_replaces_is_told_when_it_first_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "training changes Level.far, from which samples or batches are made, but load_state_dict()"
    assert str(judge(Case(), tmp_path / "filled", MovesLate)) == "exact"
    assert words not in capfd.readouterr().err
    assert not judge(Case(), tmp_path / "replaced", ReplacesLevel).exact
    assert capfd.readouterr().err.count(words) >= 2


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
    judge(Case(train={**SHORT, "workers": 1}), tmp_path / "workers", Widens)
    assert words in capfd.readouterr().err


class WidensUnsaved(Widens):
    """Does not save it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class MovesBoth(MovesLate):
    """Has two numbers of one name, of which its state has one."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.far = getattr(self, "far", 0.0) + 0.5
        self.level.far += 0.25
        return ZooTask.loss(self, model, batch) * self.far


def test_what_is_told_to_be_read_in_workers_is_not_told_once_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(WidensUnsaved, tmp_path / "here", capfd) == ["task.steps", "task.width"]
    assert told(WidensUnsaved, tmp_path / "workers", capfd, workers=1) == ["task.steps"]
    assert told(MovesBoth, tmp_path / "another", capfd, workers=1) == ["task.far"]  # which has the name of another


class Frame:
    """As one of pandas."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any) -> Frame:
        return Frame(self._values[rows])

    def to_numpy(self) -> np.ndarray:
        return self._values


class OfFrame(Relabels):
    """Takes its labels from a frame."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.frame = Frame(self.array)

    def collate(self, items: list[Any]) -> Any:
        inputs, _, indices = super().collate(items)
        return inputs, torch.from_numpy(self.frame.to_numpy())[indices], indices

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.frame.to_numpy()[:] = 1
        return ZooTask.loss(self, model, batch[:2])


def test_a_frame_that_is_read_in_workers_and_training_changes_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Frame, "__module__", "pandas.core.frame")
    judge(Case(train={**SHORT, "workers": 1}), tmp_path, OfFrame)
    assert "training changes OfFrame.frame, from which samples or batches are made" in capfd.readouterr().err


class Hardens(ZooTask):
    """Changes the level of difficulty of a set that it holds."""

    def train_data(self) -> Dataset[Any]:
        self.kept = Levels()
        return self.kept

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.kept.level += 1
        return super().loss(model, batch)


class Levels(Dataset[Any]):
    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.full((FEATURES,), float(index)) / (1 + self.level), index % CLASSES


class RelabelsUnsaved(Relabels):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(("task", "name"), [(Hardens, "Levels.level"), (RelabelsUnsaved, "TensorDataset.tensors")])
def test_what_samples_are_made_from_is_told_once(
    task: type[ZooTask], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(Case(train=SHORT), tmp_path, task, crashes=())
    said = [line for line in capfd.readouterr().err.splitlines() if "training changes" in line]
    once = dict.fromkeys(line.partition(", ")[0].partition("changes ")[2] for line in said)
    assert list(once) == [name, "task.losses"], said


class SetsAgain(ZooTask):
    """Raises the level of difficulty of its data set, and its load_state_dict() sets it again."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.steps, self.set = 0, Noised()

    def train_data(self) -> Dataset[Any]:
        return self.set

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.steps += 1
        self.set.level = self.steps / 64
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.set.level = self.steps / 64


class Noised(Dataset[Any]):
    level = 0.0

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((FEATURES,), float(index)) + self.level * torch.randn(FEATURES), index % CLASSES


def test_a_level_that_is_set_again_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(), tmp_path, SetsAgain)) == "exact"
    said = capfd.readouterr().err
    assert "task.set" not in said
    assert "different samples" not in said
