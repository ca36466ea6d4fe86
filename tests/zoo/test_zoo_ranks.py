"""Exactness for what people train, on two and three ranks. All cases run in one group of processes."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from train_ranks import run_ranks
from zoo_models import FEATURES, mlp
from zoo_optimizers import CountsForItself
from zoo_table import OF_RANKS
from zoo_training import CRASHES, MADE, Case, ZooTask, judge

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import WARNING, read_events


def judge_all(cases: list[Case], folder: Path, crashes: tuple[int, ...]) -> list[str]:
    """The verdict on each case, by this rank."""
    return [str(judge(case, folder / str(number), crashes=crashes)) for number, case in enumerate(cases)]


@pytest.mark.parametrize(("world_size", "crashes"), [(2, CRASHES), (3, CRASHES[:1])])
def test_cases_are_exact_on_several_ranks(world_size: int, crashes: tuple[int, ...], tmp_path: Path) -> None:
    cases = [Case(**{**vars(case), "train": {"global_batch": 12, **case.train}}) for case in OF_RANKS]
    for verdicts in run_ranks(judge_all, world_size, cases, tmp_path, crashes):
        assert dict(zip(map(str, cases), verdicts, strict=True)) == {str(case): "exact" for case in cases}


class WithCritic(ZooTask):
    """Has another network in DDP, in a variable of its class, which is frozen until the fifth step trains it."""

    critic: DistributedDataParallel

    def model(self) -> nn.Module:
        layers = nn.Linear(FEATURES, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 1)
        WithCritic.critic = DistributedDataParallel(nn.Sequential(*layers)).requires_grad_(False)
        self.its_optimizer = torch.optim.Adam(self.critic.parameters(), 0.01)
        self.steps = 0
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.steps > 4:
            self.critic.requires_grad_(True)
            self.its_optimizer.zero_grad()
            (self.critic(batch[0]).mean() - self.critic(-batch[0]).mean()).backward()
            self.its_optimizer.step()
        loss: Tensor = super().loss(model, batch)
        return loss * (1 + self.critic.module(batch[0]).detach().square().mean())

    def state_dict(self) -> dict[str, Any]:
        kept = {"critic": self.critic.module, "optimizer": self.its_optimizer}
        return {"steps": self.steps, **{name: part.state_dict() for name, part in kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.critic.module.load_state_dict(state["critic"])
        self.its_optimizer.load_state_dict(state["optimizer"])


EACH: list[Tensor] = []  # what Largest has found since the last update


class Since:
    """What there was since the last update."""

    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0


class Largest(nn.Module):
    """Keeps the largest score until the update, as those do that limit the logits of attention by it.

    From all scores it takes off the largest of the first ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.largest: Tensor | None = None
        self.since, self.sums, self.pairs = Since(), np.zeros(1), collections.deque[tuple[float, int]]()
        self.register_buffer("first", torch.zeros(()))
        self.is_begun = False
        total = 0.0

        def add(value: float) -> None:
            nonlocal total
            total += value

        def take() -> float:
            nonlocal total
            taken, total = total, 0.0
            return taken

        self.add, self.take = add, take

    def get_extra_state(self) -> dict[str, Any]:
        return {"is_begun": self.is_begun}

    def set_extra_state(self, state: Any) -> None:
        self.is_begun = state["is_begun"]

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        largest = scores.detach().max()
        if not self.is_begun:
            self.first.copy_(largest)
            self.is_begun = True
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        EACH.append(largest)
        self.since.passes += 1
        self.sums += float(largest)
        self.pairs.append((float(largest), 1))
        self.add(float(largest))
        return scores - self.first


class LimitsScores(ZooTask):
    """A hook of its optimizer uses what the forward passes since the last update have kept, and empties it.

    The optimizer, which counts, has the parameters in another order on one rank, as those of a set would be.
    """

    def model(self) -> nn.Module:
        return Largest()

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        assert isinstance(model, Largest)
        parameters = list(model.parameters())
        made = MADE[self] = CountsForItself(parameters[:: -1 if dist.get_rank() == 1 else 1], lr)

        def limit(*_: object) -> None:
            assert model.largest is not None
            assert model.first.count_nonzero()
            largest = torch.stack([model.largest, *EACH]).sum() + model.take() + sum(value for value, _ in model.pairs)
            largest += model.since.passes + float(model.sums.sum())
            dist.all_reduce(largest)
            with torch.no_grad():
                model.inner[0].weight.mul_(1 - 0.01 * torch.tanh(largest))
            model.largest, model.since.passes = None, 0
            EACH.clear()
            model.sums.fill(0)
            model.pairs.clear()

        made.register_step_post_hook(limit)
        return made


def judge_tasks(folder: Path) -> list[tuple[str, list[str]]]:
    found = []
    for make in (WithCritic, LimitsScores):
        verdict = judge(Case(train={"global_batch": 12}), folder / make.__name__, make, CRASHES[1:])
        [run] = (folder / make.__name__ / "calm").iterdir()
        warnings = [event["message"] for event in read_events(RunDirectory(run)) if event["event"] == WARNING]
        found.append((str(verdict), [message for message in warnings if "changes task.losses, which" not in message]))
    return found


def test_another_network_in_ddp_and_what_forward_keeps_until_the_update_are_exact(tmp_path: Path) -> None:
    """On three ranks the layout of DDP's buckets, settled before the first step, determines the bits of the sums."""
    assert run_ranks(judge_tasks, 3, tmp_path)[0] == [("exact", []), ("exact", [])]
