"""A step whose update is skipped changes nothing: no buffer, no average."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from train_ranks import run_ranks
from train_tasks import FEATURES, Plain, job, samples

from cluster_ddp.train import Trainer
from cluster_ddp.train.buffers import Buffers


class Infinite(Plain):
    """One sample is infinite, and its model has BatchNorm."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def train_data(self) -> Any:
        inputs, labels = samples()
        inputs[3, 0] = torch.inf
        return TensorDataset(inputs, labels)

    def eval_data(self) -> None:
        return None


class Watched(Infinite):
    """Keeps what the buffers and the average were before and after each step."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.seen: list[dict[str, Tensor]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.trainer is not None and self.trainer.ema is not None
        state = {**self.trainer.model.state_dict(), **{f"ema.{k}": v for k, v in self.trainer.ema.tensors().items()}}
        self.seen.append({name: value.clone() for name, value in state.items()})
        return super().loss(model, batch)


def watched(on_device: bool = False) -> list[int]:
    """The steps that changed nothing, checked to be those that were skipped."""
    spec = job(train={"steps": 9, "global_batch": 12, "lr": 0.01, "ema_decay": 0.9})
    task = Watched()
    task.trainer = trainer = Trainer(spec, task)
    if on_device:  # the answer stays a tensor, as on a GPU
        step = trainer.update.step
        trainer.update.step = lambda **more: torch.tensor([float(step(**more))])  # type: ignore[method-assign]
    trainer.run()
    same = [
        number
        for number, (before, after) in enumerate(itertools.pairwise(task.seen))
        if all(torch.equal(before[name], after[name]) for name in before)
    ]
    assert 0 < trainer.update.skipped <= len(same) + 1
    assert all(bool(value.isfinite().all()) for state in task.seen for value in state.values())
    return same


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_that_is_skipped_leaves_buffers_and_average_as_they_were(on_device: bool) -> None:
    assert watched(on_device) == [3, 4]


def test_a_step_that_is_skipped_leaves_the_buffers_of_all_ranks_as_they_were() -> None:
    assert run_ranks(watched, 3) == [[3, 4]] * 3


def test_buffers_are_put_back_bit_by_bit_by_an_answer_on_the_device() -> None:
    model = nn.Module()
    kinds = (torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.uint8)
    for kind in kinds:
        model.register_buffer(f"of_{str(kind)[6:]}", torch.randn(5).to(kind))
    model.register_buffer("one", torch.ones(()).expand(3))
    model.register_buffer("none", None)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = Buffers(model)
    for was_skipped in (True, torch.ones(1), torch.zeros(1)):
        buffers.keep()
        for name, buffer in model.named_buffers():
            if name != "one":
                buffer.copy_(torch.full((5,), torch.nan).to(buffer.dtype) if buffer.is_floating_point() else buffer + 1)
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        buffers.put_back(was_skipped)
        wanted = before if bool(was_skipped) else after
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer.isnan(), wanted[name].isnan()), name
            assert torch.equal(buffer.nan_to_num(), wanted[name].nan_to_num()), name
    buffers.keep()
    model.none = torch.ones(1)
    buffers.put_back(torch.ones(1))
    assert model.none is None


def test_a_model_whose_buffers_are_none_trains() -> None:
    buffers = Buffers(nn.InstanceNorm1d(3))
    for was_skipped in (False, True):
        buffers.keep()
        buffers.put_back(was_skipped)


def test_buffers_that_have_been_given_other_memory_are_put_back() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers(model)
    buffers.keep()
    mean = model.running_mean
    mean.data = torch.ones(3)
    for is_replaced in (False, True):
        buffers.keep()
        if is_replaced:
            mean.data = torch.zeros(3)
        mean.add_(1)
        buffers.put_back(True)
        assert mean.tolist() == [1, 1, 1]


def sent() -> list[float]:
    """What a rank has in a buffer that it has replaced, in one it was built with, and in one that was None at first."""
    model = nn.Module()
    model.register_buffer("replaced", torch.zeros(1))
    model.register_buffer("written", torch.zeros(1))
    model.register_buffer("late", None)
    buffers, rank = Buffers(model), float(dist.get_rank())
    model.replaced = torch.full((1,), 5.0 + rank)
    model.written += 7 + rank
    model.late = torch.full((1,), rank)
    buffers.send()
    return [model.replaced.item(), model.written.item(), model.late.item()]


def test_ranks_get_the_buffers_of_rank_0_even_if_they_have_replaced_them() -> None:
    assert run_ranks(sent, 3) == [[5.0, 7.0, float(rank)] for rank in range(3)]
