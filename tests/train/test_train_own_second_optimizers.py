"""Several optimizers in a custom loop: passed in, forgotten, or growing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from own_loops import LOADERS, begin_attempt, failure, model_of, new_run, told
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.train import join_run


class Recalls(torch.optim.SGD):
    """Adds the gradient before to each, and counts: of the two a checkpoint holds the count."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.before, self.count = torch.zeros(()), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0]
        self.count += 1
        self.before, weight.grad = weight.grad, weight.grad + self.before / self.count
        return super().step(closure)


def two_optimizers(place: Path, kind: Any) -> None:
    """Trains two models, each by an optimizer of its own."""
    begin_attempt(place, 0)
    with join_run() as run:
        models = model_of(), model_of()
        first, second = torch.optim.SGD(models[0].parameters(), lr=0.1), kind(models[1].parameters(), lr=0.1)
        loader = run.resumable(
            LOADERS["tensors"](), one=models[0], other=models[1], first=first, second=second, epochs=1
        )
        for _ in loader.epochs():
            for inputs, labels in loader:
                for model, optimizer in zip(models, (first, second), strict=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()


def test_what_a_second_optimizer_keeps_in_itself_is_told(tmp_path: Path) -> None:
    keeping, plain = new_run(tmp_path / "keeping"), new_run(tmp_path / "plain")
    for run, kind in ((keeping, Recalls), (plain, torch.optim.Adam)):
        assert run_ranks(two_optimizers, 1, run.path, kind) == [None]
    (message,) = told(keeping)
    assert "training changes second.before, which" in message
    assert told(plain) == []


def growing(place: Path) -> int:
    """The steps that are begun when the second of two optimizers is given another model in the third."""
    begin_attempt(place, 0)
    begun = 0
    with contextlib.suppress(SystemExit), join_run() as run:
        models = [model_of() for _ in range(3)]
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models[:2])
        things = dict(zip("abc", models, strict=True))
        for step in run.steps(9, **things, first=first, second=second, third=torch.optim.SGD(models[2].parameters())):
            begun += 1
            if step == 2:
                second.add_param_group({"params": models[2].parameters()})
            first.step()
            second.step()
    return begun


def test_a_group_that_is_added_is_refused_in_that_step_whichever_optimizer_it_is(tmp_path: Path) -> None:
    run = new_run(tmp_path, every=99)
    assert run_ranks(growing, 1, run.path) == [3]
    assert "before run.resumable() or run.steps()), and let those that are trained later start with" in failure(run)


class Divided(torch.optim.SGD):
    """Computes the update of all on rank 0 alone, as Muon's in modded-nanogpt are divided among the ranks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for weight in self.param_groups[0]["params"]:
            if torch.distributed.get_rank() == 0:
                self.state[weight]["before"] = weight.grad.clone()


def divided(place: Path) -> None:
    begin_attempt(place, 0)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = DistributedDataParallel(model_of())
        first, second = torch.optim.SGD(model.module[:4].parameters()), Divided(model.module[4].parameters())
        for _ in run.steps(4, model=model, first=first, second=second):
            model(torch.randn(4, 6)).square().mean().backward()
            first.step()
            second.step()


def test_a_second_optimizer_that_divides_its_state_among_the_ranks_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(divided, 2, run.path)
    assert "after step 2 optimizers differ between the ranks: task.more" in failure(run)
    assert "the optimizer's state is not the same on every rank" in failure(run)
