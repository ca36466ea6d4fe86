"""A loop of Lightning's Fabric is one's own: what Fabric has set up is passed in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from own_loops import Images, begin_attempt, digest, interrupt, model_of, new_run
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train_ranks import preload, run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.objects.held import of_module


def train(place: Path, attempt: int, at: int | None) -> str | None:
    """A loop with two batches to an update; interrupted after `at` of these in this attempt. Its weights."""
    from lightning.fabric import Fabric

    begin_attempt(place, attempt)
    ranks, updates = int(os.environ["WORLD_SIZE"]), 0
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    try:
        with join_run() as run:
            torch.manual_seed(5)
            bare = model_of()
            model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.05))
            loader = fabric.setup_dataloaders(DataLoader(Images(), 6 // ranks, shuffle=True, drop_last=True))
            loader = run.resumable(loader, model=model, optimizer=optimizer, epochs=3)
            for _ in loader.epochs():
                for number, (inputs, labels) in loader.enumerate():
                    is_last = number % 2 == 1 or number + 1 == len(loader)
                    with fabric.no_backward_sync(model, enabled=not is_last):
                        fabric.backward(F.cross_entropy(model(inputs), labels))
                    if is_last:
                        optimizer.step()
                        optimizer.zero_grad()
                        updates += 1
                        if updates == at:
                            interrupt("stop")
    except SystemExit as end:
        return f"status {end.code}"
    return digest(bare) if at is None else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_fabric_goes_on_exactly(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning.fabric")  # not above: collecting would import it in each worker
    preload("lightning.fabric")
    calm = run_ranks(train, ranks, new_run(tmp_path / "calm").path, 0, None)
    broken = new_run(tmp_path / "broken").path
    assert run_ranks(train, ranks, broken, 0, 6) == [None] * ranks
    assert run_ranks(train, ranks, broken, 1, None) == calm
    assert "status" not in str(calm)


def test_a_model_that_is_compiled_where_fabric_takes_part_has_not_changed() -> None:
    """Importing Fabric is enough for torch.compile() to leave a mark in the model."""
    pytest.importorskip("lightning.fabric")
    model = model_of()
    before = Attributes(of_module(model))
    assert torch.compile(model, backend="eager") is not model
    assert before.changed(Attributes(of_module(model))) == []
