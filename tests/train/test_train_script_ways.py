"""Scripts of one's own: schedulers of torch, weights that are not finite, sys.exit(0), and no seed."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, MultiStepLR, OneCycleLR, SequentialLR
from train_ranks import run_ranks

from cluster_ddp.job import CheckpointSpec, JobSpec, load_resolved
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import SampleStream, join_run
from cluster_ddp.train.randomness import Use, derive, keep_generators, seed_everything

STEPS = 9

SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda opt: LambdaLR(opt, lambda step: 0.5**step),
    "ExponentialLR": lambda opt: ExponentialLR(opt, 0.9),
    "MultiStepLR": lambda opt: MultiStepLR(opt, [2, 6], gamma=0.1),
    "OneCycleLR": lambda opt: OneCycleLR(opt, 0.1, total_steps=STEPS + 1),
    "SequentialLR": lambda opt: SequentialLR(opt, [ExponentialLR(opt, 0.9), ExponentialLR(opt, 0.5)], milestones=[5]),
}


def script(place: Path, attempt: int, name: str, crash: int | None, way: str = "") -> tuple[Any, list[float]]:
    """How a script with a scheduler of torch ends, and the learning rate of each of its steps."""
    RunDirectory(place).attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    os.environ.update(CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT=str(attempt))
    rates: list[float] = []
    try:
        with join_run(folder="nowhere") as run:
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = SCHEDULES[name](optimizer)

            def loss() -> Tensor:
                return model(torch.ones(2, 3)).square().mean()

            stream = SampleStream(16, 4, 0)
            run.resume(model, optimizer, stream, total_steps=STEPS, also=scheduler)
            while run.step < STEPS:
                run.begin_step()
                if run.step == crash:
                    if way == "exit":
                        raise SystemExit(0)
                    raise ValueError("crash")
                rates.append(optimizer.param_groups[0]["lr"])
                loss().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if way == "nan" and run.step == 3:
                    with torch.no_grad():
                        model.weight.fill_(math.nan)
                run.log(run.step + 1, {"train/loss": 1.0})
                if run.end_step():
                    break
    except SystemExit as end:
        return end.code, rates
    return None, rates


def new_run(folder: Path) -> RunDirectory:
    checkpoint = CheckpointSpec(every_steps=4, background=False)
    job = JobSpec(name="own", script="own.py", checkpoint=checkpoint)
    return create_run(job, runs_dir=folder, via="local", script=None)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_scheduler_of_torch_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    [(_, whole)] = run_ranks(script, 1, new_run(tmp_path / "calm").path, 0, name, None)
    broken = new_run(tmp_path / "broken").path
    [(_, first)] = run_ranks(script, 1, broken, 0, name, 5)
    [(_, second)] = run_ranks(script, 1, broken, 1, name, None)
    assert first[:4] + second == whole


def test_weights_that_are_not_finite_are_not_saved_by_a_script(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    [(status, _)] = run_ranks(script, 1, run.path, 0, "ExponentialLR", None, "nan")
    assert status == 1
    assert "completed" not in [event["event"] for event in read_events(run)]
    assert list(run.checkpoints.glob("step-*")) == []


def test_exit_with_status_0_is_no_failure(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    [(status, _)] = run_ranks(script, 1, run.path, 0, "ExponentialLR", 5, "exit")
    assert status in (0, None)
    assert [event["event"] for event in read_events(run)][-1] == "completed"


def drawn(place: Path, seed: int | None) -> tuple[float, float]:
    """What a program draws in its block, from torch and Python."""
    RunDirectory(place).attempt(0).path.mkdir(parents=True, exist_ok=True)
    os.environ.update(CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT="0")
    if seed is not None:
        torch.manual_seed(seed)
    with join_run():
        return torch.rand(()).item(), random.random()


def test_a_program_that_seeds_nothing_draws_by_the_seed_of_the_job(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with keep_generators():
        seed_everything(derive(Use.BUILD, load_resolved(run.job_file).train.seed))
        expected = torch.rand(()).item(), random.random()
        torch.manual_seed(5)
        of_its_own = torch.rand(()).item()
    assert run_ranks(drawn, 2, run.path, None) == [expected, expected]
    [(found, _)] = run_ranks(drawn, 1, run.path, 5)
    assert found == of_its_own
