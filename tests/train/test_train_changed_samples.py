"""Samples made from what training changes, such as pseudo-labels, are exact without workers, and told with workers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relabeling_tasks import CHANGED, Collating, Labelled, OfTask, Pseudo, Rows, Stream, resumed
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from train_tasks import FEATURES, Noisy, Plain, samples

from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import Loader
from cluster_ddp.train.errors import DataError


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tensor", "Labelled.labels"),
        ("array", "Labelled.labels"),
        ("pairs", "Labelled.labels"),
        ("subset", "Labelled.labels"),
        ("iterable", "Labelled.labels"),
        ("task", "Pseudo.labels"),
        ("closure", "Pseudo.labels"),
        ("variable", "LABELS"),
        ("collate", "Collating.level"),
    ],
)
def test_what_workers_do_not_see_is_told(kind: str, name: str, tmp_path: Path) -> None:
    changed, warnings = resumed(Collating if kind == "collate" else Pseudo, kind, 2, tmp_path)
    assert changed
    for messages in warnings:
        assert [message for message in messages if message.startswith(f"training changes {name}{CHANGED}")]


@pytest.mark.parametrize("kind", ["list", "subset", "task", "collate"])
def test_without_workers_samples_may_be_made_from_what_training_changes(kind: str, tmp_path: Path) -> None:
    changed, warnings = resumed(Collating if kind == "collate" else Pseudo, kind, 0, tmp_path)
    assert (changed, warnings) == ([], [[], [], []])


class Counting(Plain):
    """Its data set holds the task, which counts, and restores a constant from which batches are made."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples()
        self.seen, self.mean = 0, torch.ones(FEATURES)

    def eval_data(self) -> None:
        return None

    def label(self, index: int) -> Tensor:
        return self.labels[index]

    def train_data(self) -> Dataset[Any]:
        return OfTask(self)  # type: ignore[arg-type]

    def collate(self, items: list[Any]) -> Any:
        inputs, labels, _ = super().collate(items)
        return inputs - self.mean, labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        return super().loss(model, batch) * (1 + self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.mean = state["seen"], state["mean"].clone()


def test_what_no_sample_is_made_from_may_change(tmp_path: Path) -> None:
    assert resumed(lambda _: Counting(), "", 2, tmp_path) == ([], [[], [], []])


class Passing(Stream):
    """Notes where it is, by itself."""

    epoch = place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.places = epoch, [self.place]

    def __iter__(self) -> Any:
        self.place = self.epoch
        for item in super().__iter__():
            self.place += 1
            self.places[0] = self.place
            yield item


class Passed(Counting):
    def train_data(self) -> Dataset[Any]:
        return Passing(super().train_data())  # type: ignore[arg-type]


def test_what_a_stream_itself_changes_is_not_told(tmp_path: Path) -> None:
    assert resumed(lambda _: Passed(), "", 0, tmp_path) == ([], [[], [], []])


class Shared(Stream):
    """Has its epoch in memory that the workers share, as the streams of Hugging Face's datasets do."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch += epoch - self.epoch

    def __iter__(self) -> Any:
        return map(self.data.__getitem__, np.random.default_rng(int(self.epoch)).permutation(len(self)))


class InWorkers(Counting):
    def train_data(self) -> Dataset[Any]:
        return Shared(super().train_data())


def test_the_epoch_that_a_stream_shares_with_its_workers_is_not_told(tmp_path: Path) -> None:
    assert resumed(lambda _: InWorkers(), "", 2, tmp_path) == ([], [[], [], []])


class Chosen(Stream):
    """Leaves out what has been seen with the first label."""

    def __iter__(self) -> Any:
        return (item for item in map(self.data.__getitem__, range(len(self))) if item[1])


class Choosing(Pseudo):
    def train_data(self) -> Dataset[Any]:
        data = Labelled(self.inputs, self.labels)
        return Chosen(data) if self.kind == "chosen" else Stream(data)


@pytest.mark.parametrize("kind", ["content", "chosen"])
def test_items_of_a_stream_that_depend_on_what_training_changes_are_told(kind: str, tmp_path: Path) -> None:
    changed, warnings = resumed(Choosing, kind, 0, tmp_path)
    assert bool(changed) == (kind == "chosen")
    start = "training changes Labelled.labels, from which samples or batches are made, but a resume reads the items"
    assert all(messages[0].startswith(start) for messages in warnings)
    repeated = [message.split(":")[0] for messages in warnings for message in messages[1:]]
    assert repeated == ["the resume is not exact"] * bool(changed)


@pytest.mark.parametrize("kind", ["tensor", "array", "variable"])
def test_rows_that_training_changes_are_read_when_their_step_begins(kind: str, tmp_path: Path) -> None:
    assert resumed(Rows, kind, 0, tmp_path) == ([], [[], [], []])


class Rolling(Plain):
    """Changes which of the rows a Subset takes."""

    def __init__(self) -> None:
        self.indices = np.arange(40)

    def eval_data(self) -> None:
        return None

    def train_data(self) -> Dataset[Any]:
        return Subset(TensorDataset(*samples()), self.indices)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.indices[:] = (self.indices + 1) % 50
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"indices": self.indices}

    def load_state_dict(self, state: Any) -> None:
        self.indices[:] = state["indices"]


def test_a_step_reads_the_rows_that_a_subset_takes_as_it_begins(tmp_path: Path) -> None:
    assert resumed(lambda _: Rolling(), "", 0, tmp_path) == ([], [[], [], []])


class Selecting(Rolling):
    """Chooses other samples for a Subset by a list, of rows or of a set that draws random numbers."""

    def __init__(self, data: Dataset[Any], how: str) -> None:
        self.data, self.how = data, how

    def train_data(self) -> Dataset[Any]:
        self.subset = Subset(Subset(self.data, range(50)), list(range(40)))
        return self.subset

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.choose([(index + 1) % 50 for index in self.subset.indices])
        return Plain.loss(self, model, batch)

    def choose(self, chosen: list[int]) -> None:
        if self.how == "replaced":
            self.subset.indices = chosen
        else:
            self.subset.indices[:] = chosen  # type: ignore[index]

    def state_dict(self) -> dict[str, Any]:
        return {"indices": self.subset.indices}

    def load_state_dict(self, state: Any) -> None:
        self.choose(state["indices"])


@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("data", [TensorDataset(*samples()), Noisy()])
def test_a_step_may_choose_other_samples_for_a_subset(data: Dataset[Any], how: str, tmp_path: Path) -> None:
    assert resumed(lambda _: Selecting(data, how), "", 0, tmp_path) == ([], [[], [], []])


@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("rows", [True, False])
def test_a_subset_is_read_as_it_is_now(how: str, rows: bool) -> None:
    (inputs, labels), chosen = samples(), [0, 1, 2]
    whole = TensorDataset(inputs, labels) if rows else Labelled(inputs, labels)
    subset = Subset(whole, chosen)
    fetcher = Fetcher(subset, default_collate)
    fetcher.expect_changes(subset)
    loader = Loader(fetcher, range(3), lambda _: (0, np.arange(3)), workers=0, device=torch.device("cpu"))
    seen = []
    for _, batch in loader:
        seen.append(batch[1].tolist())
        if how == "replaced":
            subset.indices = [index + 3 for index in subset.indices]
        else:
            chosen[:] = [index + 3 for index in chosen]
    assert seen == [labels[first : first + 3].tolist() for first in (0, 3, 6)]
    subset.indices = [0]
    with pytest.raises(DataError, match="fewer samples than when training began"):
        fetcher(0, np.arange(3))


@pytest.mark.parametrize("width", [1, 16])
def test_rows_are_read_again_if_something_unknown_has_changed_them(width: int) -> None:
    rows = torch.zeros(8, width)
    fetcher = Fetcher(TensorDataset(rows), default_collate)
    loader = Loader(fetcher, range(8), lambda row: (0, np.array([row])), workers=0, device=torch.device("cpu"))
    seen = []
    for _, (batch,) in loader:
        seen.append(batch[0, 0].item())
        if len(seen) % 3 == 0:
            rows += 1
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2]


class Leveled(Labelled):
    level = 0.0

    def __getitem__(self, index: int) -> Any:
        inputs, label, _ = super().__getitem__(index)
        return inputs + self.level, label


class Curriculum(Plain):
    """Sets a level of difficulty, whose first value the class of the data set has, also in a number of processes."""

    def __init__(self) -> None:
        self.seen, self.shared = 0, multiprocessing.Value("d", 0.0)

    def eval_data(self) -> None:
        return None

    def train_data(self) -> Dataset[Any]:
        self.data = Leveled(*samples())
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        self.data.level = self.shared.value = 0.1 * self.seen
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "level": self.shared.value}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]
        self.data.level = self.shared.value = state["level"]


class HeldByTask(Curriculum):
    """Has the level itself; samples are made from it."""

    level = 0.0

    def train_data(self) -> Dataset[Any]:
        return AskingTask(self)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.level += 0.1
        return Plain.loss(self, model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: Any) -> None:
        self.level = state["level"]


class AskingTask(Dataset[Any]):
    def __init__(self, task: HeldByTask) -> None:
        self.task, (self.inputs, self.labels) = task, samples()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + self.task.level, self.labels[index]


@pytest.mark.parametrize("task", [Curriculum, HeldByTask])
def test_a_level_that_comes_back_is_not_told(
    task: type[Curriculum], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if the first step after the resume is saved, or is the last of a pass."""
    sections = {"checkpoint": {"every_steps": 6, "background": False}}
    changed, (calm, first, after) = resumed(lambda _: task(), "", 0, tmp_path, **sections)
    assert (changed, calm, first, after) == ([], [], [], [])
    assert "after a pass" not in capfd.readouterr().err


class Replacing(Pseudo):
    """Does not put the labels where the data set holds them."""

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.level, self.labels = state["seen"], state["level"].clone(), state["labels"]


@pytest.mark.parametrize(("kind", "is_exact"), [("tensor", False), ("subset", False), ("task", True)])
def test_samples_that_do_not_follow_what_the_task_restores_are_told(kind: str, is_exact: bool, tmp_path: Path) -> None:
    changed, warnings = resumed(Replacing, kind, 0, tmp_path)
    assert bool(changed) != is_exact
    start = (
        "training changes Labelled.labels, from which samples or batches are made, but load_state_dict() of the task"
    )
    for messages in warnings if is_exact else warnings[:2]:
        assert [message.startswith(start) for message in messages] == [True] * (not is_exact)


class Exchanged(Pseudo):
    """Has other data after a resume, too."""

    made = 0

    def train_data(self) -> Dataset[Any]:
        Exchanged.made += 1
        return Subset(Labelled(self.inputs + (Exchanged.made == 3), self.labels), range(40))


def test_other_data_are_told_although_the_task_changes_them_too(tmp_path: Path) -> None:
    _, (calm, first, after) = resumed(Exchanged, "subset", 0, tmp_path)
    assert (calm, first) == ([], [])
    assert [message.split(":")[0] for message in after] == [
        "a sample of train_data() has changed since the checkpoint was saved",
        "the resume is not exact",
    ]
