"""The model and the optimizer that are made once more for a check leave no trace in the task that trains."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from train_ranks import run_ranks
from train_tasks import Plain, differences, final_state, job, new_run, train

from cluster_ddp.train import Trainer, broadcast_object, is_main_process

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


class Communicating(Plain):
    """Its methods wait for those of the other ranks: for a download, and for what each rank counts for itself."""

    def __init__(self, which: str) -> None:
        self.which, self.seen = which, 0.0

    def eval_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        if self.which == "model()":
            dist.barrier()
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += float(batch[0].mean())
        return super().loss(model, batch) * (1.0 + self.seen if self.which == "state_dict()" else 1.0)

    def state_dict(self) -> dict[str, Any]:
        if self.which == "model()":
            return {}
        seen: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, self.seen)
        return {"seen": seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"][dist.get_rank()] if state else 0.0


def whole_and_resumed(folder: Path, which: str) -> list[str]:
    sections = {"train": {"steps": 6, "global_batch": 24}, "log": {"every_steps": 1}}

    def run_of(kind: str) -> Any:
        return broadcast_object(new_run(folder / kind, **sections) if is_main_process() else None)

    whole, _ = train(Communicating(which), job(**sections), run_of("whole"))
    broken = run_of("broken")
    train(Communicating(which), job(**sections), broken, stop_at=4)
    resumed, _ = train(Communicating(which), job(**sections), broken, 1)
    return differences(final_state(whole), final_state(resumed))


@pytest.mark.parametrize("which", ["model()", "state_dict()"])
def test_methods_of_a_task_may_communicate_between_the_ranks(which: str, tmp_path: Path) -> None:
    assert run_ranks(whole_and_resumed, 2, tmp_path, which) == [[], []]
