"""Saving from and restoring to a GPU: the copy overlaps with what comes next, and is the state as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import checkpointer, same, save, state

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _on_gpu(seed: int) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.cuda() for name, tensor in state(seed, 2000).items()}
    tensors["optimizer.layer.weight.step"] = torch.tensor(float(seed))  # AdamW keeps it on the CPU
    tensors["model.transposed"] = torch.randn(300, 500, device="cuda").t()
    return tensors


class Driver:
    """CUDA's runtime, which also counts how often memory is pinned."""

    def __init__(self) -> None:
        self.real = torch.cuda.cudart()
        self.pinned = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def cudaHostRegister(self, *arguments: int) -> int:
        status = int(self.real.cudaHostRegister(*arguments))
        self.pinned += status == 0
        return status


def test_the_state_at_the_call_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    live = _on_gpu(1)
    wanted = {name: tensor.clone() for name, tensor in live.items()}
    target = checkpointer(tmp_path)
    busy = torch.randn(4000, 4000, device="cuda")
    for step in (1, 2):
        for _ in range(20):
            busy = busy @ busy / 4000  # the stream is far behind the host
        for name, tensor in live.items():  # what is saved is there only then
            tensor.add_(1)
            wanted[name].add_(1)
        save(target, step, live)
        live["model.norm.running_mean"].add_(1)  # buffers change in the forward pass, before wait_for_staging
        target.wait_for_staging()
        for tensor in live.values():
            tensor.zero_()
        assert target.finish()
        assert driver.pinned == 1
        found = {name: torch.ones_like(tensor) for name, tensor in wanted.items()}
        restored = checkpointer(tmp_path).restore(found)
        assert restored is not None and restored.step == step
        assert same({n: t.cpu() for n, t in found.items()}, {n: t.cpu() for n, t in wanted.items()})
        for name, tensor in live.items():
            tensor.copy_(wanted[name])
    target.close()


def test_from_the_gpu_to_the_cpu_and_back(tmp_path: Path) -> None:
    saved = _on_gpu(3)
    target = checkpointer(tmp_path)
    save(target, 1, saved)
    target.close()
    on_cpu = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in saved.items()}
    assert checkpointer(tmp_path).restore(on_cpu) is not None
    assert same(on_cpu, {name: tensor.cpu() for name, tensor in saved.items()})


def test_the_host_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    live = {name: tensor for name, tensor in _on_gpu(1).items() if tensor.is_cuda}
    target = checkpointer(tmp_path)
    save(target, 1, live)
    target.finish()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        save(target, 2, live)
        target.wait_for_staging()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert target.finish()
    target.close()


def test_a_copy_is_not_published_if_what_it_copies_changes_meanwhile(tmp_path: Path) -> None:
    live = {"model.layer.weight": torch.nn.Parameter(torch.ones(1 << 28, device="cuda"))}
    target = checkpointer(tmp_path)

    def is_published(step: int) -> bool:
        save(target, step, live)
        live["model.layer.weight"].data.neg_()  # as loss() might: a GiB takes much longer to be copied
        target.wait_for_staging()
        return target.finish()

    assert is_published(0)  # the driver gets memory for the digest, for which it waits until the copy is done
    spoilt = next((step for step in range(1, 9) if not is_published(step)), None)
    assert spoilt is not None, "others that use this GPU must have delayed the change each time"
    assert is_published(spoilt + 1)
    target.close()
