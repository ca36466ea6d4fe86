"""Masks and tables that a model makes in its first forward pass, from positions only, are made again after a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_loops import begin_attempt, new_run, told
from torch import Tensor, nn
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.state import hidden_buffers
from cluster_ddp.train.state.position_tables import is_table, without_tables

ANGLES = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
TABLES = {
    "causal": torch.ones(8, 8, dtype=torch.bool).tril()[None, None],
    "added": torch.full((8, 8), -torch.inf, dtype=torch.bfloat16).triu(1),
    "distances": torch.arange(8)[:, None] - torch.arange(8),
    "cos": ANGLES.cos().bfloat16()[None],
    "both": torch.stack([ANGLES.sin(), ANGLES.cos()], -1).flatten(1),
    "complex": torch.polar(torch.ones_like(ANGLES), ANGLES),
    "positions": torch.arange(8)[None],
    "from 0 to 1": torch.linspace(0, 1, 12),
    "angles": ANGLES.bfloat16(),
    "rows": 8,
    "loss.labels.cpu": torch.arange(12),
    "loss.size": 12,
}
OTHERS = {
    "noise": torch.randn(8, 8, generator=torch.Generator().manual_seed(1)),
    "zeros": torch.zeros(8, 8),
    "counts": torch.full((8,), 5),
    "next rows": torch.arange(8) + 8,
    "bins up to the largest": torch.linspace(0, 0.8143, 11),
    "count": 7,
}


def test_what_depends_on_positions_only_is_told_from_the_rest() -> None:
    leaves = {**TABLES, **OTHERS}
    assert without_tables(leaves, {}, leaves) == list(OTHERS)


def test_a_table_of_as_many_positions_with_other_values_is_no_table_of_positions() -> None:
    before = {"causal": TABLES["causal"][..., :4, :4], "cos": ANGLES.sin().bfloat16()[None], "added": None}
    assert without_tables(before, before, TABLES) == ["cos"]


def test_a_table_is_looked_at_once_more_only_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked = nn.Linear(2, 2), []
    monkeypatch.setattr(hidden_buffers, "find_world", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(hidden_buffers, "is_table", lambda tensor: bool(looked.append(tensor)) or is_table(tensor))
    hidden = hidden_buffers.HiddenBuffers(model)
    model.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)
    assert [list(hidden.changed()) for _ in range(3)] == [[], [], []] and len(looked) == 1
    model.mask.data[0, 0] = 5.0
    assert list(hidden.changed()) == ["mask"] and len(looked) == 2


class Attention(nn.Module):
    """Makes what it needs in its first pass, and one mask in each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.mask: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.made_from = 0

    def forward(self, inputs: Tensor) -> Any:
        length = inputs.shape[-1]
        if self.mask is None:
            self.mask = torch.ones(length, length).tril()
            self.tables[length] = ANGLES.cos()
            self.made_from = length
            self.first_rows = inputs.detach().clone()
        self.each = torch.randn(8, generator=torch.Generator().manual_seed(1))
        return self.inner(inputs) @ self.mask + self.tables[length][:, 0] + self.each


def train(place: Path) -> None:
    begin_attempt(place, 0)
    with join_run() as run:
        model = Attention()
        model(torch.zeros(8))
        model.mask, model.tables, model.made_from = None, {}, 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in run.steps(4, model=model, optimizer=optimizer):
            model(torch.randn(8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_only_what_depends_on_the_data_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train, 1, run.path)
    (message,) = told(run)
    assert message.startswith("training changes model.first_rows, which no checkpoint contains")
