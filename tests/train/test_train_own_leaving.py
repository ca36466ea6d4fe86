"""Ranks that leave an epoch of a custom loop: together, or one before the others."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from own_loops import begin_attempt, digest, distributed, model_of, new_run, states, told
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.run.stopfile import PREEMPTION, SAVE_AND_END
from cluster_ddp.train import join_run
from cluster_ddp.train.own import leaving


def leave_in_turn(place: Path, kind: str) -> None:
    """A loop that rank 0 leaves in its second batch or after an epoch, and rank 1 there, too, a second later."""
    leaving.LEAVING_SECONDS = 0.3
    begin_attempt(place, 0)
    with contextlib.suppress(SystemExit), join_run() as run:
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

        if kind == "steps":
            any(map(train, run.steps(9, model=model, optimizer=optimizer)))
            return
        loader = run.resumable(distributed(6)(), model=model, optimizer=optimizer, epochs=1 + (kind == "exit"))
        for _ in loader.epochs():
            if kind == "epochs":
                any(train(number) for number, _ in loader.enumerate())
            else:
                list(map(train, (number for number, _ in loader.enumerate())))
                time.sleep(run.world.rank)
                sys.exit(0)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("epochs", "epoch 0 after 2 of its 4 batches"),
        ("steps", "its loop in step 1 of 9"),
        ("exit", "its loop in step 4 of 8"),
    ],
)
def test_a_rank_that_leaves_before_the_others_says_so(kind: str, place: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(leave_in_turn, 2, run.path, kind)
    (message,) = told(run)
    # Not "rank 1 left": the node program would not record it (see `RankWarnings`).
    words = f"the ranks do not leave together: rank 0 left {place}, and 0.3 s later not all of the other ranks have"
    assert message.startswith(words)


def leave_by_a_handler(place: Path, attempt: int, at: int | None, told_by_the_node: bool) -> str:
    """A loop that a handler of its own makes leave by sys.exit(0), also while gradients wait for an update."""
    heartbeat = HeartbeatFile.create(slots=4) if told_by_the_node else None
    if heartbeat is not None:
        os.environ["CLUSTER_DDP_HEARTBEAT"] = str(heartbeat.path)
    begin_attempt(place, attempt)
    model, asked = model_of(), []

    def handle(*_: object) -> None:
        asked.append(1)
        if heartbeat is not None:  # it has told the node program, too, and that tells all ranks
            heartbeat.post_stop(SAVE_AND_END, PREEMPTION)

    try:
        with join_run() as run:
            signal.signal(signal.SIGUSR1, handle)
            torch.manual_seed(5)
            model.load_state_dict(model_of().state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = run.resumable(distributed(6)(), model=model, optimizer=optimizer, epochs=2)
            for _ in loader.epochs():
                for number, (inputs, labels) in loader.enumerate():
                    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                    if run.step == at:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    if asked:
                        sys.exit(0)
    except SystemExit as end:
        assert end.code == 0
    finally:
        if heartbeat is not None:
            heartbeat.unlink()
    return digest(model)


@pytest.mark.parametrize("at", [10, 11], ids=["between updates", "after an update"])
def test_a_loop_that_is_left_early_while_a_stop_is_asked_for_was_stopped(at: int, tmp_path: Path) -> None:
    calm, run = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    expected = run_ranks(leave_by_a_handler, 1, calm.path, 0, None, True)
    run_ranks(leave_by_a_handler, 1, run.path, 0, at, True)
    assert run_ranks(leave_by_a_handler, 1, run.path, 1, None, True) == expected
    assert states(run) == ["started", "stopped", "resumed", "completed"]
    assert told(run) == []


def test_a_handler_of_the_program_s_own_that_keeps_stops_off_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(leave_by_a_handler, 1, run.path, 0, None, False)
    (message,) = told(run)
    assert message.startswith("the program set its own handler for SIGUSR1 within the block of join_run()")
