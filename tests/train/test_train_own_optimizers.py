"""Optimizers that a task cannot have, in a loop of one's own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from own_loops import begin_attempt, digest, distributed, interrupt, new_run
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.train import join_run


def by_closure(place: Path, attempt: int, at: tuple[int, int] | None) -> str | None:
    """Trains by LBFGS, which looks at the loss of all ranks; stopped in batch `at`."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3, history_size=4)
        loader = run.resumable(distributed(4)(), model=model, optimizer=optimizer, epochs=3)
        for epoch in loader.epochs():
            for number, (inputs, labels) in loader.enumerate():

                def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), labels)
                    loss.backward()
                    of_all = loss.detach()
                    all_reduce(of_all)
                    return of_all

                optimizer.step(closure)
                if at == (epoch, number):
                    interrupt("stop")
        return digest(model)
    return None


def attempts(calm: Path, broken: Path) -> list[str | None]:
    return [by_closure(calm, 0, None), by_closure(broken, 0, (1, 2)), by_closure(broken, 1, None)]


def test_lbfgs_whose_closure_gives_the_loss_of_all_ranks_is_exact(tmp_path: Path) -> None:
    for whole, stopped, resumed in run_ranks(attempts, 2, new_run(tmp_path / "w").path, new_run(tmp_path / "b").path):
        assert whole is not None
        assert (stopped, resumed) == (None, whole)
