"""What a loop keeps by run.keep is put back under all the names that the program has for it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import LOADERS, begin_attempt, interrupt, model_of, new_run
from torch.nn import functional as F
from train_ranks import run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train import join_run
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.beginning import Beginning
from cluster_ddp.train.own.kept import KeptValues


def train(place: Path, attempt: int, at: int | None, how: str) -> list[Any]:
    """A loop that changes what it keeps in place, by names of its own; one value is replaced in the last batches."""
    begin_attempt(place, attempt)
    try:
        with join_run() as run:
            torch.manual_seed(5)
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            memory: deque[Any] = deque(maxlen=3)
            history: list[float] = []
            seen, total, best = np.zeros(3), torch.zeros(3), {"of": torch.zeros(3)}
            first_best = best["of"]
            run.keep(average=average, memory=memory, history=history, seen=seen)
            loader = run.resumable(LOADERS["shuffled"](), model=model, optimizer=optimizer, epochs=3)
            kept = run.keep(total=total, best=best)  # after the checkpoint has been read, too
            for _ in loader.epochs():
                inner = average["0.weight"]
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    outputs = model(inputs) + 0.01 * total
                    F.cross_entropy(outputs, labels).backward()
                    optimizer.step()
                    total += outputs.detach().mean(0)
                    seen += outputs.detach().mean(0).numpy()
                    for name, weight in model.named_parameters():
                        average[name].lerp_(weight.detach(), 0.1)
                    assert inner is average["0.weight"]
                    memory.append(inputs[0])
                    history.append(float(total.sum()))
                    if run.step > 20:
                        kept.best = {"of": outputs.detach()[0]}
                    if run.step == at:
                        interrupt(how)
                history.append(-1.0)
            assert not first_best.any()
            return [average, list(memory), history, seen, total, kept.best["of"], list(model.parameters())]
    except SystemExit:
        pass
    return []


@pytest.mark.parametrize(("at", "how"), [(5, "stop"), (18, "crash")])
def test_what_is_changed_in_place_is_put_back_in_its_place(at: int, how: str, tmp_path: Path) -> None:
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    (expected,) = run_ranks(train, 1, whole.path, 0, None, "")
    assert run_ranks(train, 1, cut.path, 0, at, how) == [[]]
    assert run_ranks(train, 1, cut.path, 1, at + 4, "stop") == [[]]
    (found,) = run_ranks(train, 1, cut.path, 2, None, "")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [event for event in read_events(cut) if event["event"] == "warning"] == []


def test_a_name_is_kept_once() -> None:
    """Each call would put the saved value back, also in later epochs, which begin with the initial one."""
    kept = KeptValues()
    kept.add({"total": 0.0})
    with pytest.raises(TrainError, match="called again"):
        kept.add({"total": 0.0})


def test_an_epoch_does_not_keep_before_its_batches() -> None:
    beginning = Beginning(draws_itself=False)
    beginning.hand_out()
    beginning.expect_no_epoch(["total"])  # before the loop
    beginning.begin()
    with pytest.raises(TrainError, match=r"run.keep\(total=...\) is called in an epoch"):
        beginning.expect_no_epoch(["total"])
    beginning.batch()
    beginning.expect_no_epoch(["center"])  # whose shape a batch gives
