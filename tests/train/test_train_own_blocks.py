"""Programs with several blocks of join_run: a stop ends the program, and a second loop is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, begin_attempt, distributed, failure, interrupt, model_of, new_run, states
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.history import read_history
from cluster_ddp.train import join_run


def evaluate(done: list[str]) -> None:
    with join_run():
        done.append("evaluated")


def train(done: list[str], folder: Path | None = None, at: int | None = None, how: str = "stop") -> None:
    with join_run(folder) as run:
        done.append("entered")
        several = run.world.world_size > 1
        model = DistributedDataParallel(model_of()) if several else model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = distributed(6)() if several else LOADERS["shuffled"]()
        loader = run.resumable(loader, model=model, optimizer=optimizer, epochs=2)
        for _ in loader.epochs():
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if run.step == at:
                    interrupt(how)
        done.append("trained")


def program(place: Path, attempt: int, blocks: list[dict[str, Any] | None]) -> tuple[list[str], Any]:
    """Blocks, one after the other; what they did and the program's status."""
    begin_attempt(place, attempt)
    done: list[str] = []
    try:
        for block in blocks:
            if block is None:
                evaluate(done)
            else:
                train(done, **block)
    except SystemExit as end:
        return done, end.code
    return done, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_in_a_block_ends_the_program_before_the_next(ranks: int, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(program, ranks, run.path, 0, [{"at": 3}, {}]) == [(["entered"], 0)] * ranks
    assert states(run) == ["started", "stopped"]
    assert run_ranks(program, ranks, run.path, 1, [{}, None]) == [(["entered", "trained", "evaluated"], None)] * ranks
    assert states(run) == ["started", "stopped", "resumed", "completed"]


def test_a_second_loop_in_a_later_block_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ((done, status),) = run_ranks(program, 1, run.path, 0, [{}, {}])
    assert (done, status) == (["entered", "trained", "entered"], 1)
    assert "in this block of join_run() or in an earlier one" in failure(run)


def test_a_block_that_only_evaluates_does_not_complete_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(program, 1, run.path, 0, [None, {"at": 4, "how": "crash"}]) == [(["evaluated", "entered"], 1)]
    assert outcome_of(read_history(run), 0).ending is Ending.FAILED
    assert run_ranks(program, 1, run.path, 1, [None, {}]) == [(["evaluated", "entered", "trained"], None)]
    assert outcome_of(read_history(run), 1).ending is Ending.COMPLETED


def by_hand(folder: Path) -> list[tuple[list[str], Any]]:
    """The same without cluster-ddp, in one process, which is a script's."""
    os.environ.pop("CLUSTER_DDP_RUN", None)
    sys.modules["__main__"].__file__ = str(folder / "train.py")
    ends = []
    for name, at in (("one", 3), ("one", None), ("other", None), ("other", None)):
        done: list[str] = []
        status = None
        try:
            train(done, folder / name, at)
        except SystemExit as end:
            status = end.code
        ends.append((done, status))
    return ends


def test_without_the_launcher_each_folder_has_its_blocks(tmp_path: Path) -> None:
    (ends,) = run_ranks(by_hand, 1, tmp_path)
    assert ends == [(["entered"], None), ([], 0), (["entered", "trained"], None), (["entered"], 1)]
