"""Tasks that give their samples new labels while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from own_loops import told
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from train_tasks import CLASSES, Plain, differences, final_state, job, new_run, samples, train

LABELS = torch.zeros(50, dtype=torch.int64)


CHANGED = ", from which samples or batches are made, but workers have copies"


class Labelled(Dataset[Any]):
    def __init__(self, inputs: Tensor, labels: Any) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        label = self.labels[index]
        return self.inputs[index], label[1] if isinstance(label, tuple) else int(label), index


class Stream(IterableDataset[Any]):
    def __init__(self, data: Labelled) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        return map(self.data.__getitem__, range(len(self)))


class OfTask(Labelled):
    """Asks the task for each label."""

    def __init__(self, task: Pseudo) -> None:
        self.inputs, self.task = task.inputs, task

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.task.label(index), index


class AtTheTop(Labelled):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], LABELS[index], index


class Pseudo(Plain):
    """Gives the samples that a step has seen new labels."""

    def __init__(self, kind: str) -> None:
        self.kind, self.seen, self.level = kind, 0, torch.zeros(1)
        self.inputs, labels = samples()
        LABELS.copy_(labels)
        self.labels: Any = {
            "array": labels.numpy().copy(),
            "list": labels.tolist(),
            "pairs": [("file", label) for label in labels.tolist()],
            "variable": LABELS,
        }.get(kind, labels.clone())

    def eval_data(self) -> None:
        return None

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def train_data(self) -> Dataset[Any]:
        data = Labelled(self.inputs, self.labels)
        if self.kind == "closure":

            class Inner(Labelled):
                def __getitem__(inner, index: int) -> Any:
                    return self.inputs[index], self.labels[index], index

            return Inner(self.inputs, None)
        return {
            "subset": Subset(data, range(40)),
            "iterable": Stream(data),
            "task": OfTask(self),
            "variable": AtTheTop(self.inputs, None),
        }.get(self.kind, data)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels, indices = batch
        scores = model(inputs)
        self.seen += 1
        self.level += 0.1
        for index, label in zip(indices.tolist(), ((scores.argmax(1) + self.seen) % CLASSES).tolist(), strict=True):
            if self.kind != "collate":
                for place in (index, (index + 9) % 40):
                    self.labels[place] = ("file", label) if self.kind == "pairs" else label
        return F.cross_entropy(scores, labels)

    def state_dict(self) -> dict[str, Any]:
        return {"labels": self.labels, "seen": self.seen, "level": self.level}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.level = state["seen"], state["level"].clone()
        self.labels[:] = state["labels"]


class Collating(Pseudo):
    def collate(self, items: list[Any]) -> Any:
        inputs, labels, indices = super().collate(items)
        return inputs + self.level, labels, indices


class Rows(Pseudo):
    """Has them in a TensorDataset, whose rows are read for several steps together if nothing changes them."""

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(self.inputs, torch.as_tensor(self.labels), torch.arange(len(self.labels)))


def resumed(make: Any, kind: str, workers: int, folder: Path, **sections: Any) -> tuple[list[str], list[list[str]]]:
    """What a stop and a resume change, and the warnings of the run in one go and of both attempts of the other."""
    sections |= {"train": {"steps": 9, "global_batch": 8, "workers": workers}}
    whole, broken = (new_run(folder / name, **sections) for name in ("whole", "broken"))
    calm, _ = train(make(kind), job(**sections), whole)
    state = final_state(calm)
    train(make(kind), job(**sections), broken, stop_at=5)
    first = told(broken)
    after, _ = train(make(kind), job(**sections), broken, 1)
    return differences(state, final_state(after)), [told(whole), first, told(broken)[len(first) :]]
