"""Activation checkpointing: blocks are computed a second time, and nothing but the memory changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from train_tasks import CLASSES, FEATURES, Plain, differences, final_state, job, train

from cluster_ddp.train import TaskError
from cluster_ddp.train.model import prepare_model
from cluster_ddp.train.recomputing import checkpoint_blocks

CPU = torch.device("cpu")


class Blocks(Plain):
    """Blocks with dropout and BatchNorm, to be computed twice."""

    def model(self) -> nn.Module:
        block = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4)) for _ in range(3)]
        return nn.Sequential(nn.Linear(FEATURES, 16), *block, nn.Linear(16, CLASSES))


def test_activation_checkpointing_changes_nothing_but_the_memory() -> None:
    plain, _ = train(Blocks(), job(train={"steps": 8, "global_batch": 24}))
    recomputed, _ = train(Blocks(), job(train={"steps": 8, "global_batch": 24, "grad_checkpointing": True}))
    assert differences(final_state(plain), final_state(recomputed)) == []


def test_activation_checkpointing_forgets() -> None:
    """Fewer bytes are kept for the backward pass."""
    kept = []
    for checkpointed in (False, True):
        model = Blocks().model().train()
        if checkpointed:
            assert checkpoint_blocks(model) == 5
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: (s.append(t.nbytes), t)[1], lambda t: t):
            model(torch.randn(64, FEATURES, requires_grad=True)).sum()
        kept.append(sum(saved))
    assert kept[1] < 0.5 * kept[0]


def test_blocks_in_lists_of_lists_are_found_once() -> None:
    """A layer that is used twice is a single block; where a layer lacks a part, there is None."""
    shared = nn.Linear(2, 2)
    first = nn.ModuleList([nn.Linear(2, 2), shared, None])  # type: ignore[list-item]
    second = nn.ModuleDict({"attention": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})
    assert checkpoint_blocks(nn.ModuleList([first, second, shared, None])) == 4  # type: ignore[list-item]


def test_activation_checkpointing_needs_blocks() -> None:
    with pytest.raises(TaskError, match=r"nn\.ModuleList"):
        prepare_model(nn.Linear(2, 2), job(train={"grad_checkpointing": True}).train, CPU)


def test_blocks_with_synchronised_batchnorm_are_computed_again() -> None:
    """As they are on GPUs; without a process group it counts like BatchNorm."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain)  # type: ignore[no-untyped-call]
    checkpoint_blocks(model)
    inputs = torch.randn(8, 4)
    model(inputs).sum().backward()
    norm = model[1][0]
    assert isinstance(norm, nn.SyncBatchNorm) and norm.num_batches_tracked is not None and norm.running_mean is not None
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * model[0](inputs).mean(0).detach())


class Counts(nn.Linear):
    """What it computes depends on how often it was called, by a buffer and by an attribute, and on random numbers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.again, self.own = 0, np.random.default_rng(0)
        self.passes, self.sums = list[int](), np.zeros(1)
        self.means = {"inner": [torch.zeros(4)]}
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.again += 1
        self.passes.append(self.again)
        self.sums += len(self.passes)
        for held in (self.means["inner"][0], self.centre):
            held += inputs.detach().mean(0)
        noise = random.random() + np.random.rand() + self.own.random()
        shift = self.means["inner"][0].clone() - 0.5 * self.centre.clone()
        return torch.tanh(super().forward(inputs) * self.calls.clone() + shift + self.sums.sum() + noise)


def test_blocks_are_computed_again_with_what_they_held_and_drew_at_first() -> None:
    inputs = torch.randn(8, 4)

    def gradients(*, checkpointed: bool, penalty: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        counts = Counts()
        blocks = nn.ModuleList(
            [
                nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
                counts,
                nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
                nn.Linear(4, 4),
            ]
        )
        if checkpointed:
            checkpoint_blocks(blocks)
        random.seed(0)
        np.random.seed(0)
        scores = inputs
        for block in [*blocks, counts]:
            scores = block(scores)
        loss = scores.square().sum()
        if penalty:  # the blocks are computed twice more
            (slope,) = torch.autograd.grad(loss, counts.weight, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        drawn = torch.tensor([random.random(), np.random.rand(), counts.own.random(), counts.again, counts.sums.sum()])
        drawn = torch.cat([drawn, counts.means["inner"][0], counts.centre])
        return [drawn, *blocks.buffers(), *(weight.grad for weight in blocks.parameters() if weight.grad is not None)]

    for penalty in (False, True):
        plain, again = (gradients(checkpointed=checkpointed, penalty=penalty) for checkpointed in (False, True))
        for before, after in zip(plain, again, strict=True):
            torch.testing.assert_close(after, before)


class Quantized(nn.Parameter):
    """A weight of a library's class, which keeps its scale beside it."""

    scale = 1.0


class Scales(nn.Linear):
    """Multiplies by the scales of its frozen weights."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.coarse, self.fine = Quantized(torch.ones(4), requires_grad=False), nn.Parameter(torch.ones(4), False)
        self.coarse.scale = 2.0
        self.fine.scale = 3.0  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scaled = inputs * self.coarse * self.coarse.scale * self.fine * self.fine.scale  # type: ignore[attr-defined]
        return torch.tanh(super().forward(scaled))


def test_frozen_weights_keep_their_class_and_attributes_where_blocks_are_computed_again() -> None:
    model = nn.ModuleList([Scales()])
    inputs = torch.randn(8, 4)
    plain = torch.autograd.grad(model[0](inputs).sum(), model[0].weight)[0]
    checkpoint_blocks(model)
    assert torch.equal(torch.autograd.grad(model[0](inputs).sum(), model[0].weight)[0], plain)


class Cache(list[torch.Tensor]):
    """A cache of keys that blocks fill, as those of transformers."""

    def get_seq_length(self) -> int:
        return len(self)


class Attends(nn.Linear):
    """Attends to the keys in the cache, to which it adds its own."""

    def forward(self, inputs: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        keys = super().forward(inputs)
        if cache is not None:
            cache.append(keys)
            keys = torch.cat([*cache])
        return torch.softmax(inputs @ keys.T, 1) @ keys


def test_blocks_do_not_fill_an_empty_cache_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "__module__", "transformers.cache_utils")
    model = nn.ModuleList([Attends(4, 4)])
    inputs = torch.randn(8, 4)
    plain = torch.autograd.grad(model[0](inputs, cache=Cache()).square().sum(), model[0].weight)[0]
    checkpoint_blocks(model)
    for again in (model[0](inputs, Cache()), model[0](inputs, cache=Cache())):
        torch.testing.assert_close(torch.autograd.grad(again.square().sum(), model[0].weight)[0], plain)
