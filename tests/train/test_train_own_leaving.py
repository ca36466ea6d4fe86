"""Ranks that leave an epoch of a loop of one's own: together, or one before the others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from own_loops import begin_attempt, distributed, model_of, new_run, told
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.own import leaving


def leave_in_turn(place: Path, in_steps: bool) -> None:
    """A loop that rank 0 leaves in its second batch, and rank 1 in the same batch a second later."""
    leaving._PATIENCE = 0.3
    begin_attempt(place, 0)
    with join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(model_of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(number: int) -> bool:
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            if number == 1:
                time.sleep(run.world.rank)
            return number == 1

        if in_steps:
            any(map(train, run.steps(9, model=model, optimizer=optimizer)))
            return
        loader = run.resumable(distributed(6)(), model=model, optimizer=optimizer, epochs=1)
        for _ in loader.epochs():
            any(train(number) for number, _ in loader.enumerate())


@pytest.mark.parametrize(
    ("in_steps", "place"),
    [(False, "epoch 0 after 2 of its 4 batches"), (True, "its loop in step 1 of 9")],
    ids=["epochs", "steps"],
)
def test_a_rank_that_leaves_before_the_others_says_so(in_steps: bool, place: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(leave_in_turn, 2, run.path, in_steps)
    (message,) = told(run)
    assert message.startswith(f"rank 0 has left {place}, and for 0.3 s not all of the other ranks have")
