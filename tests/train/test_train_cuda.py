"""On GPUs: no step waits for the GPU that need not, formats resume bit by bit, SyncBatchNorm sees the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate
from train_ranks import run_ranks
from train_tasks import Everything, Plain, differences, final_state, job, losses, new_run, samples, train

from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import Loader, pinned, to_device
from cluster_ddp.train.own import kept

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one, and Gloo has no SyncBatchNorm"
)


class Watched(Plain):
    """In the steps from 4 to 14 torch raises an error when the host waits for the GPU."""

    def __init__(self, *, waiting: bool = False, weighed: bool = False) -> None:
        self.calls, self.waiting, self.weighed = 0, waiting, weighed

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mode = {4: "error", 14: "default"}.get(self.calls)
        if mode is not None:
            torch.cuda.set_sync_debug_mode(mode)
        self.calls += 1
        loss = super().loss(model, batch)
        if self.waiting:
            loss.item()
        return (loss * len(batch[0]), len(batch[0])) if self.weighed else loss


def watched(folder: Path, settings: dict[str, Any], waiting: bool, weighed: bool = False) -> str | None:
    sections: dict[str, Any] = {"train": {"steps": 18, "global_batch": 24, **settings}, "log": {"every_steps": 3}}
    try:
        train(Watched(waiting=waiting, weighed=weighed), job(**sections), new_run(folder, **sections))
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16", "clip_norm": 1.0, "ema_decay": 0.9, "schedule": "cosine", "warmup_steps": 3},
        {"precision": "fp16", "clip_norm": 1.0},
        {"accumulation_steps": 2, "workers": 1},
    ],
    ids=["fp32", "bf16", "fp16", "workers"],
)
def test_the_host_waits_for_no_gpu_in_a_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert run_ranks(watched, 1, tmp_path, settings, False, gpus=True) == [None]


def test_the_host_waits_for_no_gpu_where_a_batch_has_a_weight(tmp_path: Path) -> None:
    assert run_ranks(watched, 1, tmp_path, {}, False, True, gpus=True) == [None]


def test_a_wait_would_have_been_seen(tmp_path: Path) -> None:
    (error,) = run_ranks(watched, 1, tmp_path, {}, True, gpus=True)
    assert error is not None and "synchroniz" in error


class Noisy(Everything):
    """BatchNorm, dropout, random augmentation, and random numbers of the GPU in the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs + 0.01 * torch.randn_like(inputs)), labels)


def resumed(folder: Path, precision: str) -> tuple[list[str], list[tuple[int, float]], list[tuple[int, float]]]:
    """What differs at the end of a training with two stops from one without, and the losses of both."""
    settings = {"steps": 16, "global_batch": 24, "precision": precision, "deterministic": True, "ema_decay": 0.9}
    sections: dict[str, Any] = {"train": settings, "log": {"every_steps": 1}}
    calm, broken = (new_run(folder / kind, **sections) for kind in ("calm", "broken"))
    whole, _ = train(Noisy(), job(**sections), calm)
    for attempt, stop_at in enumerate([5, 9, None]):
        part, outcome = train(Noisy(), job(**sections), broken, attempt, stop_at=stop_at)
        assert outcome.completed == (stop_at is None)
    assert whole.device.type == "cuda"
    return differences(final_state(whole), final_state(part)), losses(calm), losses(broken)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_on_a_gpu_is_resumed_bit_by_bit(tmp_path: Path, precision: str) -> None:
    ((different, whole, parts),) = run_ranks(resumed, 1, tmp_path, precision, gpus=True)
    assert different == []
    assert len(whole) == 16 and whole == parts


def test_batches_reach_the_gpu_by_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinnings: list[bool] = []

    def watched(batch: Any, device: torch.device) -> Any:
        pinnings.append(batch[0].is_pinned())
        return to_device(batch, device)

    monkeypatch.setattr("cluster_ddp.train.data.loader.to_device", watched)
    inputs, labels = samples()
    batch = pinned({"pair": (inputs, [labels])})
    assert batch["pair"][0].is_pinned() and batch["pair"][1][0].is_pinned()
    device = torch.device("cuda", 0)
    plans = [(0, np.array([4, 2])), (0, np.array([7, 9]))]
    for workers in (0, 1):
        fetcher = Fetcher(TensorDataset(inputs, labels), default_collate, 1)
        loader = Loader(fetcher, plans, lambda plan: plan, workers=workers, device=device)
        (first, _), (second, _) = (batch for _, batch in loader)
        assert first.device == device and torch.equal(first.cpu(), inputs[[4, 2]])
        assert torch.equal(second.cpu(), inputs[[7, 9]])
        loader.close()
    assert pinnings == [True] * 4


def staged(folder: Path) -> bool:
    """Whether the trainer has had its memory for checkpoints pinned, once, by CUDA's runtime."""
    from cluster_ddp.train import Trainer

    runtime, registered = torch.cuda.cudart(), []

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def cudaHostRegister(self, *arguments: int) -> int:
            registered.append(int(runtime.cudaHostRegister(*arguments)))
            return registered[-1]

    torch.cuda.cudart = Driver
    sections: dict[str, Any] = {"train": {"steps": 6, "global_batch": 24}, "checkpoint": {"every_steps": 2}}
    Trainer(job(**sections), Plain(), new_run(folder, **sections)).run()
    return registered == [0]


def test_checkpoints_are_copied_into_pinned_memory(tmp_path: Path) -> None:
    assert run_ranks(staged, 1, tmp_path, gpus=True) == [True]


def test_what_a_loop_keeps_on_a_gpu_goes_to_the_other_ranks_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take memory on the GPU of each other."""
    sent: list[str] = []

    def noted(value: tuple[Any, dict[str, Tensor], Any]) -> list[Any]:
        sent.extend(tensor.device.type for tensor in value[1].values())
        return [value]

    monkeypatch.setattr(kept, "all_gather_object", noted)
    numbers = kept.KeptValues()
    numbers.add({"hidden": [torch.ones(2, 3, device="cuda").t()], "count": torch.ones(())})
    numbers.gather()
    assert sent == ["cpu", "cpu"]
    (found,) = numbers.by_rank
    assert found["count"].device.type == "cpu"
    assert (found["hidden"][0].device.type, found["hidden"][0].stride()) == ("cuda", (1, 3))


class Normed(Plain):
    """A net with BatchNorm whose weights hardly move, so that its statistics are the data's."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def statistics(sync_batchnorm: bool) -> dict[str, Tensor]:
    settings = {"steps": 4, "global_batch": 24, "lr": 1e-9, "sync_batchnorm": sync_batchnorm, "evaluate_every": "end"}
    trainer, _ = train(Normed(), job(train=settings))
    return {name: buffer.cpu() for name, buffer in trainer.model.named_buffers() if "running" in name}


@two_gpus
def test_sync_batchnorm_has_the_statistics_of_the_big_batch() -> None:
    (whole,) = run_ranks(statistics, 1, False, gpus=True)
    for found in run_ranks(statistics, 2, True, gpus=True):
        for name, expected in whole.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
    apart = run_ranks(statistics, 2, False, gpus=True)[0]
    assert not torch.allclose(apart["1.running_var"], whole["1.running_var"], rtol=1e-3)


def compressed(hook: str) -> tuple[bool, float]:
    settings = {"steps": 6, "global_batch": 24, "comm_hook": hook, "precision": "bf16"}
    _, outcome = train(Plain(), job(train=settings))
    return outcome.completed, outcome.metrics["train/loss"]


@two_gpus
@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_gradients_are_compressed_on_their_way(hook: str) -> None:
    for completed, loss in run_ranks(compressed, 2, hook, gpus=True):
        assert completed and loss < 2.0
