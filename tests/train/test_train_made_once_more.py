"""The model and the optimizer that are made once more for a check leave no trace in the task that trains."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_tasks import Plain, job, new_run

from cluster_ddp.train import Trainer

NETS: dict[str, nn.Module] = {}
NET: nn.Module | None = None


class Keeping(Plain):
    """Keeps its model where a copy of the task would keep another, and trains what it finds there."""

    of_class: nn.Module | None = None

    def __init__(self, where: str) -> None:
        self.where = where
        self.nets: dict[str, nn.Module] = {}
        self.ordered: OrderedDict[int, nn.Module] = OrderedDict()
        self.listed: list[nn.Module] = []
        self.kept = SimpleNamespace(net=None)

    def eval_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        global NET
        made = super().model()
        self.nets["net"] = NETS["net"] = NET = self.kept.net = Keeping.of_class = made
        self.listed.append(made)
        self.ordered[len(self.ordered)] = made
        return made

    def net(self) -> Any:
        return {
            "a dict": self.nets["net"],
            "a list": self.listed[-1],
            "an ordered dict": list(self.ordered.values())[-1],
            "an object": self.kept.net,
            "a variable": NET,
            "a dict in a variable": NETS["net"],
            "the class": self.of_class,
        }[self.where]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net()(inputs), labels)


@pytest.mark.parametrize(
    "where",
    ["a dict", "a list", "an ordered dict", "an object", "a variable", "a dict in a variable", "the class"],
)
def test_a_task_goes_on_with_the_model_that_it_has_kept(where: str, tmp_path: Path) -> None:
    spec = job(train={"steps": 5})
    unchecked = Trainer(spec, Keeping(where))  # without checkpoints, nothing is made once more
    unchecked.run()
    run = new_run(tmp_path, train={"steps": 5})
    task = Keeping(where)
    checked = Trainer(spec, task, run)
    checked.run()
    assert task.net() is checked.model
    for name, weight in unchecked.model.state_dict().items():
        assert torch.equal(weight, checked.model.state_dict()[name]), name
