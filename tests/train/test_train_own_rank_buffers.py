"""Buffers of which each rank has its own come back on each rank."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_loops import begin_attempt, digest, interrupt, model_of, new_run, told
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from train_ranks import run_ranks

from cluster_ddp.run.directory import step_name
from cluster_ddp.train import join_run
from cluster_ddp.train.own import rank_buffers
from cluster_ddp.train.ranks.distributed import reduce_tensor

TABLE = 1 << 16  # bytes


class Network(nn.Module):
    """With BatchNorm, and a large buffer that is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of()
        self.register_buffer("table", torch.zeros(TABLE // 4))

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)


def train(
    place: Path, attempt: int, at: int | None, *, kind: str = "sent by DDP", at_most: int | None = None
) -> tuple[dict[int, Any], str]:
    """A loop that reads its models outside of DDP, and has a mean teacher whose buffers follow those of the model."""
    begin_attempt(place, attempt)
    if at_most is not None:
        rank_buffers.MAX_BYTES = at_most
    seen: dict[int, Any] = {}
    found = ""
    try:
        with join_run() as run:
            torch.manual_seed(5)
            model = DistributedDataParallel(Network(), broadcast_buffers=kind != "not sent")
            teacher = copy.deepcopy(model.module).eval()
            averaged = AveragedModel(model.module, use_buffers=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            things = {"model": model, "teacher": teacher, "averaged": averaged, "optimizer": optimizer}
            for step in run.steps(8, **things):
                seen[step] = [digest(model.module), digest(teacher), digest(averaged)]
                batch = torch.randn(4, 6)
                wanted = teacher(batch).detach()
                # As in Lightning's manual optimization: only the first forward pass of DDP replaces buffers.
                with model.no_sync() if kind == "sent once" else contextlib.nullcontext():
                    (model(batch) - wanted).square().mean().backward()
                for weight in model.parameters() if kind == "sent once" else ():
                    weight.grad = reduce_tensor(weight.grad)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, now in zip(teacher.parameters(), model.module.parameters(), strict=True):
                        mean.lerp_(now, 0.1)
                    for mean, now in zip(teacher.buffers(), model.module.buffers(), strict=True):
                        mean.copy_(now)
                if step % 2:
                    averaged.update_parameters(model.module)
                if step == at:
                    interrupt("stop")
            found = digest(model.module, teacher, averaged)
    except SystemExit:
        pass
    return seen, found


@pytest.mark.parametrize("kind", ["sent by DDP", "sent once", "not sent"])
def test_the_buffers_of_each_rank_come_back(kind: str, tmp_path: Path) -> None:
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    expected = run_ranks(train, 2, whole.path, 0, None, kind=kind)
    assert expected[0] != expected[1]
    run_ranks(train, 2, cut.path, 0, 3, kind=kind)
    found = run_ranks(train, 2, cut.path, 1, None, kind=kind)
    assert [end for _, end in found] == [end for _, end in expected]
    for (seen, _), (calm, _) in zip(found, expected, strict=True):
        assert 3 < min(seen) < 7
        assert seen == {step: calm[step] for step in seen}
    assert told(whole) == told(cut) == []
    shards = (cut.checkpoints / step_name(8)).glob("*.safetensors")
    assert sum(shard.stat().st_size for shard in shards) < 5 * TABLE  # once for each model, and not for each rank


def test_buffers_too_large_to_be_saved_for_each_rank_are_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train, 2, run.path, 0, None, at_most=100)
    (message,) = told(run)
    assert message.startswith(
        "the ranks hold different buffers, too large to be saved for each of them: model.layers.1"
    )


class Late(nn.Module):
    """Makes a buffer in its first forward pass, on each rank a different one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of()

    def forward(self, inputs: Tensor) -> Any:
        if not hasattr(self, "offset"):
            self.register_buffer("offset", torch.tensor(float(dist.get_rank())), persistent=False)
        return self.layers(inputs + self.offset)


def train_late(place: Path, attempt: int, at: int | None) -> str:
    begin_attempt(place, attempt)
    found = ""
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(Late(), broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(6, model=model, optimizer=optimizer):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == at:
                interrupt("stop")
        found = digest(model.module)
    return found


def test_a_buffer_that_is_not_there_yet_after_a_resume_does_not_prevent_it(tmp_path: Path) -> None:
    """A KeyError did."""
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    expected = run_ranks(train_late, 2, whole.path, 0, None)
    assert run_ranks(train_late, 2, cut.path, 0, 2) == ["", ""]
    assert run_ranks(train_late, 2, cut.path, 1, None) == expected
