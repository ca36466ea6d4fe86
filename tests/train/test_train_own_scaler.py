"""run.resumable with a GradScaler: its scale, and the updates that it leaves out, are the same after a resume."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, begin_attempt, digest, failure, interrupt, model_of, new_run
from torch.nn import functional as F
from train_ranks import run_ranks

from cluster_ddp.train import join_run

OVERFLOWS = ((0, 5), (1, 3))


def scaled(place: Path, attempt: int, at: tuple[int, int] | None = None, how: str = "stop") -> dict[str, Any]:
    """A loop in mixed precision, as PyTorch's documentation has it; two updates are skipped."""
    begin_attempt(place, attempt)
    done: dict[str, Any] = {"scales": {}}
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        loader = run.resumable(LOADERS["shuffled"](), model=model, optimizer=optimizer, scaler=scaler, epochs=2)
        for epoch in loader.epochs():
            for number, (inputs, labels) in loader.enumerate():
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(inputs), labels)
                if (epoch, number) in OVERFLOWS:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                done["scales"][epoch, number] = scaler.get_scale()
                if at == (epoch, number):
                    interrupt(how)
        done["digest"] = digest(model)
    return done


def story(calm: Path, broken: Path) -> list[dict[str, Any]]:
    """Left alone; and crashed, stopped in a step whose update is skipped, resumed."""
    return [scaled(calm, 0), scaled(broken, 0, (0, 4), "crash"), scaled(broken, 1, (1, 3)), scaled(broken, 2)]


def test_a_gradient_scaler_goes_on_exactly(tmp_path: Path) -> None:
    (told,) = run_ranks(story, 1, new_run(tmp_path / "calm").path, new_run(tmp_path / "broken").path)
    calm, *parts = told
    assert parts[-1]["digest"] == calm["digest"]
    assert {place: scale for part in parts for place, scale in part["scales"].items()} == calm["scales"]
    assert calm["scales"][0, 5] < calm["scales"][0, 4] and calm["scales"][1, 7] > calm["scales"][1, 3]
    assert [min(part["scales"]) for part in parts] == [(0, 0), (0, 3), (1, 5)]  # the stop waits for an update


def overflowing(place: Path, spared: int) -> int:
    """A loop in which no update can be made after the first ones; the batches it has computed."""
    begin_attempt(place, 0)
    batches = 0
    with contextlib.suppress(SystemExit), join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loader = run.resumable(LOADERS["shuffled"](), model=model, optimizer=optimizer, scaler=scaler, epochs=9)
        for _ in loader.epochs():
            for inputs, labels in loader:
                batches += 1
                loss = F.cross_entropy(model(inputs), labels) * (1.0 if batches <= spared else torch.nan)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return batches


def test_updates_that_are_skipped_forever_end_the_run(tmp_path: Path) -> None:
    """After five updates the scale sinks from 8 to 1 in three; ten below are the default of ``train.max_bad_steps``."""
    run = new_run(tmp_path)
    assert run_ranks(overflowing, 1, run.path, 5) == [5 + 3 + 10]
    assert "the GradScaler has skipped 10 updates in a row" in failure(run)
    assert "train.max_bad_steps" in failure(run)


def accelerated(place: Path, attempt: int, at: int | None = None) -> list[float]:
    """The scale before each step, where Accelerate holds the scaler; stopped after step `at`."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    begin_attempt(place, attempt)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    Accelerator()
    scales = []
    with contextlib.suppress(SystemExit), join_run() as run:
        model = model_of()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), False, scaler)
        for step in run.steps(8, model=model, optimizer=optimizer):
            scales.append(scaler.get_scale())
            scaler.scale(model(torch.randn(6, 6)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == at:
                interrupt("stop")
    return scales


def test_the_scaler_in_an_optimizer_of_accelerate_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = new_run(tmp_path)
    (first,) = run_ranks(accelerated, 1, run.path, 0, 4)
    (second,) = run_ranks(accelerated, 1, run.path, 1)
    assert first + second == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0, 64.0, 64.0]
