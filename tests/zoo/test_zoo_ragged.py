"""Batches that are nested or sparse tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo_training import Case, ZooTask, judge


class Ragged(ZooTask):
    """Its batches are nested tensors, or sparse ones."""

    def __init__(self, layout: Any, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.layout = layout

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = super().collate(items)
        if self.layout is torch.sparse_csr:
            return inputs.to_sparse_csr(), labels
        return torch.nested.nested_tensor(list(inputs), layout=self.layout), labels

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        dense = inputs.to_dense() if self.layout is torch.sparse_csr else torch.stack(inputs.unbind())
        return super().loss(model, (dense, labels))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:Sparse CSR tensor support")
def test_nested_and_sparse_batches_are_exact(layout: torch.layout, tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, lambda *given: Ragged(layout, *given))) == "exact"


class RaggedAtRandom(Ragged):
    """Its batches come with other values each time, at the same places."""

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = super().collate(items)
        return inputs * random.SystemRandom().random(), labels


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:Sparse CSR tensor support")
def test_nested_and_sparse_batches_that_nobody_seeds_are_refused(layout: torch.layout, tmp_path: Path) -> None:
    verdict = judge(Case(), tmp_path, lambda *given: RaggedAtRandom(layout, *given))
    assert "differs when it is fetched again" in (verdict.refused or ""), verdict
