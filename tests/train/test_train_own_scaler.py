"""run.resumable with a GradScaler: its scale, and the updates that it leaves out, are the same after a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from own_loops import LOADERS, begin_attempt, digest, interrupt, model_of, new_run
from torch.nn import functional as F
from train_ranks import run_ranks

from cluster_ddp.train import join_run

OVERFLOWS = ((0, 5), (1, 3))


def scaled(place: Path, attempt: int, at: tuple[int, int] | None = None, how: str = "stop") -> dict[str, Any]:
    """A loop in mixed precision, as PyTorch's documentation has it; two updates are left out."""
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
    """Left alone; and crashed, stopped in a step whose update is left out, resumed."""
    return [scaled(calm, 0), scaled(broken, 0, (0, 4), "crash"), scaled(broken, 1, (1, 3)), scaled(broken, 2)]


def test_a_gradient_scaler_goes_on_exactly(tmp_path: Path) -> None:
    (told,) = run_ranks(story, 1, new_run(tmp_path / "calm").path, new_run(tmp_path / "broken").path)
    calm, *parts = told
    assert parts[-1]["digest"] == calm["digest"]
    assert {place: scale for part in parts for place, scale in part["scales"].items()} == calm["scales"]
    assert calm["scales"][0, 5] < calm["scales"][0, 4] and calm["scales"][1, 7] > calm["scales"][1, 3]
    assert [min(part["scales"]) for part in parts] == [(0, 0), (0, 3), (1, 5)]  # the stop waits for an update
