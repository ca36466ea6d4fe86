"""What an epoch computes from the model before its batches, and uses in them, is reported."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from cluster_ddp.train.own.kept import Kept, KeptValues
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.watch.before_batches import watch_before_batches
from cluster_ddp.train.own.watch.reported import Reported


class Loader:
    """Two batches, after which the loop is looked at."""

    def __init__(self, passed_in: PassedIn, kept: KeptValues) -> None:
        self.messages: list[str] = []
        self._look = lambda: list(watch_before_batches(passed_in, kept, Reported(self.messages.append)))

    def epochs(self) -> Iterator[int]:
        yield 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.rand(3, 4)
        self._look()


def reduces_variance(loader: Any, model: nn.Module, teacher: nn.Module, kept: Kept) -> None:
    snapshot = copy.deepcopy(model)
    for _ in loader.epochs():
        snapshot.load_state_dict(model.state_dict())
        means = [weight.detach().clone() for weight in model.parameters()]
        for batch in loader:
            print(snapshot(batch), means)


def labels_anew(loader: Any, model: nn.Module, teacher: nn.Module, kept: Kept) -> None:
    for _ in loader.epochs():
        model.eval()
        with torch.no_grad():
            labels = model(torch.ones(5, 4)).argmax(1)
        model.train()
        takes(loader, model, labels)


def labels_by_features(loader: Any, model: nn.Module, teacher: nn.Module, kept: Kept) -> None:
    data, other = TensorDataset(torch.ones(5, 4)), TensorDataset(torch.ones(5, 4))
    for epoch in loader.epochs():
        features = model(torch.ones(5, 4))
        data.labels = features.argmax(1)  # type: ignore[attr-defined]
        other.level = epoch  # type: ignore[attr-defined]
        takes(loader, model, torch.ones(1))


def takes(loader: Any, model: nn.Module, labels: torch.Tensor) -> None:
    for batch in loader:
        print(model(batch), labels)


def computes_what_is_saved(loader: Any, model: nn.Module, teacher: nn.Module, kept: Kept) -> None:
    for epoch in loader.epochs():
        teacher.load_state_dict(model.state_dict())
        kept.mean = model.weight.detach().clone()
        weights = list(model.parameters())
        shown = model(torch.ones(1, 4)).detach()
        torch.save(model.state_dict(), io.BytesIO())
        rate = torch.full((2,), 0.1 * epoch)
        print(shown)
        for batch in loader:
            print(teacher(batch), kept.mean, weights, rate)


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (reduces_variance, "means, snapshot"),
        (labels_anew, "labels"),
        (labels_by_features, "data.labels"),
        (computes_what_is_saved, None),
    ],
)
def test_what_an_epoch_computes_from_the_model_is_told(loop: Any, names: str | None) -> None:
    model, teacher, kept = nn.Linear(4, 2), nn.Linear(4, 2), KeptValues()
    passed_in = PassedIn({"model": model, "teacher": teacher, "optimizer": torch.optim.SGD(model.parameters())}, 1)
    loader = Loader(passed_in, kept)
    loop(loader, model, teacher, kept.add({"mean": torch.zeros(2, 4)}))
    assert [message.split(" from the model:")[0].split("computes ")[1] for message in loader.messages] == (
        [names] if names else []
    )
