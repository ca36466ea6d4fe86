"""The memory for checkpoints on a GPU machine, with a driver that plays along or does not; the copies need a GPU."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_cases import Recorder, checkpointer, save, state

from cluster_ddp.checkpoint import replicas
from cluster_ddp.checkpoint.plan import TORCH_DTYPES, describe, find_overlaps, make_plan
from cluster_ddp.checkpoint.replicas import ReplicaDigest
from cluster_ddp.checkpoint.staging import Staging


class Driver:
    """What of CUDA's runtime is used: it pins memory, or gives this status."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.pinned: list[int] = []
        self.asked = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked += 1
        if not self.status:
            self.pinned.append(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


def staging_for(seed: int, size: int = 20) -> tuple[Staging, dict[str, torch.Tensor]]:
    tensors = state(seed, size)
    staging = Staging()
    staging.prepare(make_plan(*describe(tensors), (0,)).layouts[0], pinned=True)
    return staging, tensors


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux empties memory in forked processes")
def test_a_forked_worker_has_empty_memory_in_the_place_of_the_copy() -> None:
    """With none there, a worker that frees this object would free what it has got in that place since."""
    tensors, staging = state(1, 20), Staging()
    staging.prepare(make_plan(*describe(tensors), (0,)).layouts[0], pinned=False)
    staging.copy(tensors, frozenset())
    worker = os.fork()
    if not worker:
        os._exit(any(staging.shard()))
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
    assert any(staging.shard())


def test_a_save_is_carried_out_on_the_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with GPU 0, where each rank of a node would take half a gigabyte."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: taken.append((gpu, threading.current_thread().name)))
    target = checkpointer(tmp_path)
    save(target, 1, state(1))
    assert target.finish()
    assert taken == [(3, "checkpoint")]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Driver(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer, tensors = staging_for(1)
    assert "cannot be pinned: cudaError 2" in capsys.readouterr().err
    buffer.copy(tensors, frozenset(tensors))
    assert tensors["model.layer.weight"].numpy().tobytes() in bytes(buffer.shard())
    buffer.prepare(make_plan(*describe(tensors), (0,)).layouts[0], pinned=True)
    assert driver.asked == 1  # not again at each save
    buffer.release()


@pytest.mark.parametrize("released", [True, False])
def test_pinned_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, released: bool) -> None:
    """Also when a training ends by an error and nobody closes it."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer, _ = staging_for(1)
    assert len(driver.pinned) == 1
    if released:
        buffer.release()
    del buffer
    gc.collect()
    assert driver.pinned == []


def test_what_a_task_keeps_may_change_at_any_time_even_if_it_is_named_as_parameters_are() -> None:
    """Such as a teacher that loss() updates: a save must neither copy nor compare it while the next step runs."""
    kept = ("task.0.weight", "buffer.0.weight", "extra.0.weight")
    tensors = {"model.0.weight": torch.nn.Parameter(torch.ones(2)), "optimizer.0.weight.exp_avg": torch.ones(2)}
    tensors |= {name: torch.ones(2) for name in (*kept, "ema.0.weight")}
    _, _, replicated = describe(tensors)
    assert replicated == {"model.0.weight", "optimizer.0.weight.exp_avg", "ema.0.weight"}


def test_a_copy_that_loss_has_spoilt_is_not_published_and_the_next_save_does_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt, overlapping, copy = [["model.layer.weight"], []], [], Staging.copy

    def recorded(self: Staging, tensors: dict[str, torch.Tensor], names: frozenset[str]) -> None:
        overlapping.append(bool(names))
        copy(self, tensors, names)

    monkeypatch.setattr(Staging, "copy", recorded)
    monkeypatch.setattr(ReplicaDigest, "other_copies", lambda self, copies: spoilt.pop(0))
    events = Recorder()
    target = checkpointer(tmp_path, events)
    save(target, 1, state(1))
    assert not target.finish()
    save(target, 2, state(2))
    assert target.finish()
    [failed] = events.of("checkpoint-failed")
    assert "model.layer.weight was changed before the update" in failed["error"]
    assert [fields["step"] for fields in events.of("checkpoint")] == [2]
    assert overlapping == [True, False]


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_a_copy_has_the_digest_of_what_lies_in_other_strides_and_is_summed_in_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a tensor on a GPU, where summing all of a large one at once would take a multiple of its memory."""
    values = torch.randint(0, 2, (6, 8, 16), dtype=torch.uint8).view(dtype)
    kinds = (values, values.transpose(0, 1), values[::2], values[:0], values[0, 0, 0])
    whole = [int(replicas.sum_of(tensor)) for tensor in kinds]
    monkeypatch.setattr(replicas, "PIECE", 5)
    assert [int(replicas.sum_of(tensor.clone(memory_format=torch.contiguous_format))) for tensor in kinds] == whole


def test_overlaps_are_views_of_a_part_and_not_tensors_between_each_other() -> None:
    whole, other = torch.zeros(4, 6), torch.zeros(4, 6)
    tensors = {
        "whole": whole, "rows": whole[1:3], "row": whole[2], "flat": other.view(-1), "same": other,
        "empty": whole[:0], "columns": whole[:, 3:], "alone": torch.zeros(3), "again": whole[2],
        "number": torch.ones(()),
    }  # fmt: skip
    assert find_overlaps(tensors) == {("whole", "rows"), ("whole", "again"), ("flat", "same")}
    assert find_overlaps({"even": whole.view(-1)[::2], "odd": whole.view(-1)[1::2]}) == set()
    assert find_overlaps({"first": whole[:2], "last": whole[2:]}) == set()
