"""Exactness for what people train, on two and three ranks. All cases run in one group of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks
from zoo_data import FEATURES
from zoo_table import OF_RANKS
from zoo_training import CRASHES, Case, ZooTask, judge

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
    """Has another network in DDP, which is trained from the fifth step on."""

    def model(self) -> nn.Module:
        layers = nn.Linear(FEATURES, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 1)
        self.critic = DistributedDataParallel(nn.Sequential(*layers))
        self.its_optimizer = torch.optim.Adam(self.critic.parameters(), 0.01)
        self.steps = 0
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.steps > 4:
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


def judge_critic(folder: Path) -> tuple[str, list[str]]:
    verdict = judge(Case(train={"global_batch": 12}), folder, WithCritic, CRASHES[1:])
    [run] = (folder / "calm").iterdir()
    warnings = [event["message"] for event in read_events(RunDirectory(run)) if event["event"] == WARNING]
    return str(verdict), [message for message in warnings if "critic" in message]


def test_another_network_in_ddp_may_be_trained_only_later(tmp_path: Path) -> None:
    """On three ranks the layout of DDP's buckets determines the last bits of the sums."""
    assert run_ranks(judge_critic, 3, tmp_path)[0] == ("exact", [])
