"""What is spread over the ranks in another way than by DDP is refused; what DDP keeps between steps is told."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from own_loops import LOADERS, begin_attempt, failure, model_of, new_run, told
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.train import TrainError, join_run
from cluster_ddp.train.own.geometry import Draws
from cluster_ddp.train.own.passed_in import PassedIn


def refused() -> list[str]:
    """What is said of a model in each kind of FSDP, and of an optimizer that averages the weights now and then."""
    # Here, for these imports take longer than torch's own, and whoever collects the tests would wait for them.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import PostLocalSGDOptimizer

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard  # of torch before 2.6

    whole = DistributedDataParallel(nn.Linear(4, 4))
    averager = PeriodicModelAverager(period=4)
    handed = {
        "fully_shard": (fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,))), torch.optim.SGD),
        "FSDP": (FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), torch.optim.SGD),
        "average": (whole, lambda weights: PostLocalSGDOptimizer(torch.optim.SGD(weights), averager)),
    }
    messages = []
    for model, optimizer in handed.values():
        with pytest.raises(TrainError) as error:
            PassedIn({"model": model, "optimizer": optimizer(model.parameters())}, 2)
        messages.append(str(error.value))
    return messages


def test_models_that_are_divided_among_the_ranks_are_refused_by_name() -> None:
    messages, _ = run_ranks(refused, 2)
    assert all(message.startswith("model is sharded across the ranks, for example by FSDP") for message in messages[:2])
    assert "optimizer is of type PostLocalSGDOptimizer" in messages[2]


def hooked(place: Path, keeps: bool) -> None:
    begin_attempt(place, 0)
    with join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(model_of())
        if keeps:
            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
        else:
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in run.steps(3, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()


def test_a_communication_hook_with_a_state_is_told(tmp_path: Path) -> None:
    kept, none = new_run(tmp_path / "kept"), new_run(tmp_path / "none")
    run_ranks(hooked, 2, kept.path, True)
    run_ranks(hooked, 2, none.path, False)
    assert told(none) == []
    (message,) = told(kept)
    assert message.startswith("DDP sums the gradients with a communication hook that keeps a state (PowerSGDState)")


def prepared_for_one(place: Path, by_trainer: bool) -> None:
    """What Accelerate does on the CPU without being told to use it, also for the Trainer of transformers."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    begin_attempt(place, 0)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = model_of()
        model, optimizer, loader = Accelerator().prepare(
            model, torch.optim.SGD(model.parameters()), LOADERS["tensors"]()
        )
        if by_trainer:
            run.take_over({"model": model, "optimizer": optimizer}, Draws(1))
        run.resumable(loader, model=model, optimizer=optimizer, epochs=1)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("by_trainer", [False, True])
def test_accelerate_that_sees_a_single_process_is_told_how_to_see_all(by_trainer: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = new_run(tmp_path)
    run_ranks(prepared_for_one, 2, run.path, by_trainer)
    assert "Accelerate sees a single process where there are 2 ranks" in failure(run)
