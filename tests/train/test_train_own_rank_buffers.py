"""Buffers of which each rank has its own."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from own_loops import begin_attempt, model_of, new_run, told
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.train import join_run


def train(*places: Path) -> None:
    """A loop with BatchNorm, whose buffers DDP sends from rank 0, and one where it does not."""
    for place, is_sent in zip(places, (True, False), strict=True):
        begin_attempt(place, 0)
        with join_run() as run:
            torch.manual_seed(5)
            model = DistributedDataParallel(model_of(), broadcast_buffers=is_sent)
            unused = DistributedDataParallel(model_of(), broadcast_buffers=is_sent)  # whose buffers have the same names
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in run.steps(6, model=model, unused=unused, optimizer=optimizer):
                with model.no_sync():
                    model(torch.randn(4, 6)).square().mean().backward()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_buffers_that_are_not_those_of_rank_0_are_told(tmp_path: Path) -> None:
    sent, kept = new_run(tmp_path / "sent"), new_run(tmp_path / "kept")
    run_ranks(train, 2, sent.path, kept.path)
    assert told(sent) == []
    (message,) = told(kept)
    assert message.startswith("the ranks hold different buffers: 1.running_mean of Sequential, 1.running_var of Seq")


def teach(*places: Path) -> None:
    """A loop with a mean teacher, whose buffers follow those of the model: asked in each step, and only at the end."""
    for place, is_asked in zip(places, (True, False), strict=True):
        begin_attempt(place, 0)
        with join_run() as run:
            torch.manual_seed(5)
            model = DistributedDataParallel(model_of())
            teacher = copy.deepcopy(model.module).eval()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in run.steps(6, model=model, teacher=teacher, optimizer=optimizer):
                batch = torch.randn(4, 6)
                wanted = teacher(batch).detach() if is_asked else 0.0
                (model(batch) - wanted).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, now in zip(teacher.parameters(), model.module.parameters(), strict=True):
                        mean.lerp_(now, 0.1)
                    for mean, now in zip(teacher.buffers(), model.module.buffers(), strict=True):
                        mean.copy_(now)
            teacher(torch.randn(4, 6))


def test_a_teacher_with_buffers_of_its_own_on_each_rank_is_told(tmp_path: Path) -> None:
    asked, kept = new_run(tmp_path / "asked"), new_run(tmp_path / "kept")
    run_ranks(teach, 2, asked.path, kept.path)
    assert told(kept) == []
    (message,) = told(asked)
    assert message.startswith("steps use a model outside DDP whose buffers differ between the ranks: teacher.1.running")
