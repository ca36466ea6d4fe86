"""When a checkpoint is due, and how much of a save the training waits for."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import FEATURES, Plain, job, new_run, train

from cluster_ddp.checkpoint import replicas
from cluster_ddp.checkpoint.staging import Staging
from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.run.directory import RunDirectory, step_name, steps_in
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.storage import Storage
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.saving import Saving

STEPS, EVERY = 9, 3


def test_a_checkpoint_is_due_every_so_many_steps_and_not_before_the_first() -> None:
    job = JobSpec(name="a", task="a.b:C", checkpoint=CheckpointSpec(every_steps=3))
    saving = Saving(job, None, None, 0, World(0, 0, 1))
    assert [step for step in range(10) if saving.is_due(step)] == [3, 6, 9]


class Gains(nn.Module):
    """So many small parameters, in one list."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(FEATURES)) for _ in range(number)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.stack(list(self.gains)).mean(0)


class OfGains(Plain):
    def __init__(self, number: int) -> None:
        self.number = number

    def model(self) -> nn.Module:
        return Gains(self.number)

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


def calls_of_a_save(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Python's calls while training waits for a save that is not its first, for a model of so many parameters."""
    counted: list[int] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        counted[-1] += event in ("call", "c_call")

    save = Saving.save

    def watched(*arguments: Any, **more: Any) -> None:
        counted.append(0)
        sys.setprofile(count)
        try:
            save(*arguments, **more)
        finally:
            sys.setprofile(None)

    sections = {"train": {"steps": STEPS, "global_batch": 8}, "checkpoint": {"every_steps": EVERY}}
    with monkeypatch.context() as patched:
        patched.setattr(Saving, "save", watched)
        train(OfGains(number), job(**sections), new_run(folder, **sections))
    return counted[1]


def test_a_save_takes_few_calls_for_each_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter has four tensors in a checkpoint; ten thousand of them took 0.76 s, where their copy takes 0.1."""
    few, many = (calls_of_a_save(number, tmp_path / str(number), monkeypatch) for number in (100, 500))
    assert (many - few) / 400 <= 14  # 11 as this is written


def works_of_a_save(run: RunDirectory, sections: dict[str, Any]) -> set[tuple[str, str]]:
    """What is done of a save, in the loop or beside it; on each rank."""
    done: set[tuple[str, str]] = set()
    save, in_save = Saving.save, threading.Event()

    def noted(what: str, function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if threading.current_thread().name == "checkpoint":
                done.add((what, "beside the loop"))
            elif in_save.is_set():
                done.add((what, "in the loop"))
            return function(*arguments, **more)

        return call

    def watched(*arguments: Any, **more: Any) -> None:
        in_save.set()
        save(*arguments, **more)
        in_save.clear()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Saving, "save", watched)
        patched.setattr(Staging, "copy", noted("copy", Staging.copy))
        patched.setattr(replicas, "tensor_hash", noted("hash of a tensor", replicas.tensor_hash))
        patched.setattr(Storage, "write", noted("write", Storage.write))
        patched.setattr(Storage, "fsync", noted("fsync", Storage.fsync))
        train(OfGains(3), job(**sections), run)
    return done


def test_a_save_hashes_and_writes_beside_the_loop_which_waits_for_the_copy_alone(tmp_path: Path) -> None:
    sections = {"train": {"steps": STEPS, "global_batch": 8}, "checkpoint": {"every_steps": EVERY}}
    on_rank_0, on_rank_1 = run_ranks(works_of_a_save, 2, new_run(tmp_path, **sections), sections)
    beside = {(what, "beside the loop") for what in ("hash of a tensor", "write", "fsync")}
    assert on_rank_0 == on_rank_1 == {("copy", "in the loop"), *beside}


def test_the_last_step_is_saved_where_saves_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that was ended by a stop, or is complete, lost what it had done since the save under way."""
    flush = Storage.fsync

    def slowly(storage: Storage, fd: int) -> None:
        time.sleep(0.05)
        flush(storage, fd)

    monkeypatch.setattr(Storage, "fsync", slowly)
    sections: dict[str, Any] = {
        "train": {"steps": STEPS, "global_batch": 8},
        "checkpoint": {"every_steps": 1, "when_busy": "skip", "keep_last": STEPS},
    }
    run = new_run(tmp_path, **sections)
    for attempt, stop_at in enumerate((4, None)):
        _, outcome = train(Plain(), job(**sections), run, attempt, stop_at=stop_at)
        saved = steps_in(run.checkpoints)
        assert outcome.step == max(saved) and len(saved) < outcome.step, "some were skipped"


def test_saves_that_turn_out_to_take_long_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slow storage, training waited for a save in each step after an attempt whose first save was cut short."""
    flush = Storage.fsync

    def slowly(storage: Storage, fd: int) -> None:
        time.sleep(0.02)
        flush(storage, fd)

    sections: dict[str, Any] = {
        "train": {"steps": 120, "global_batch": 8},
        "checkpoint": {"every_steps": 1000, "keep_last": 100},
    }
    run = new_run(tmp_path, **sections)
    events = EventWriter(run, "test")
    events.write("started", attempt=0, step=0)
    events.write("stop-requested", attempt=0, step=1, reason="preemption")
    for attempt in range(2):
        run.attempt(attempt).path.mkdir(parents=True)
        run.attempt(attempt).record_file.touch()
    monkeypatch.setattr(Storage, "fsync", slowly)
    loss = Plain.loss
    monkeypatch.setattr(Plain, "loss", lambda *given: time.sleep(0.005) or loss(*given))
    train(Plain(), job(**sections), run, 1)
    saves = [(event["time"] - event["seconds"], event["seconds"]) for event in read_events(run) if "bytes" in event]
    regular = saves[1:-1]  # the second was asked for before the first was measured; the last is that of the end
    assert len(regular) > 2
    assert sum(took for _, took in regular[:-1]) < 0.75 * (regular[-1][0] - regular[0][0])


@pytest.mark.parametrize("purged", [[8], [4, 8]])
def test_a_checkpoint_that_is_gone_is_missed(purged: list[int], tmp_path: Path) -> None:
    """As where a scratch file system removes what is old: the run trained again what it had trained, silently."""
    sections: dict[str, Any] = {"train": {"steps": 9, "global_batch": 8}, "checkpoint": {"every_steps": 4}}
    run = new_run(tmp_path, **sections)
    for attempt, stop_at in enumerate((8, None)):
        run.attempt(attempt).path.mkdir(parents=True)
        train(Plain(), job(**sections), run, attempt, stop_at=stop_at)
        for step in purged if attempt == 0 else []:
            shutil.rmtree(run.checkpoints / step_name(step))
    [said] = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert said.startswith("the checkpoint of step 8,")
    assert said.endswith("continues from step 4" if purged == [8] else "starts again at step 0")
    run.attempt(2).path.mkdir()
    train(Plain(), job(**sections), run, 2)
    assert len([event for event in read_events(run) if event["event"] == "warning"]) == 1, "it is told once"
