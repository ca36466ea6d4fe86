"""join_run: what a script of one's own gets and leaves, whatever way it ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.errors import Cause
from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import SampleStream, join_run
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.leaving import LeaveBlock

STEPS = 8


class Own:
    """State of the script's own: a number and a tensor."""

    def __init__(self) -> None:
        self.calls, self.sums = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls, self.sums = state["calls"], state["sums"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    job = JobSpec(name="own", script="own.py", checkpoint=CheckpointSpec(every_steps=3))
    return create_run(job, runs_dir=tmp_path, via="local", script=None)


def script(place: Path, attempt: int, stop_at: int | None = None, fail_at: tuple[int, int] | None = None) -> Any:
    """A rank: trains to the end, is sent a signal in a step, or raises an error in (step, rank)."""
    heartbeat = HeartbeatFile.create(slots=4)
    RunDirectory(place).attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT=str(attempt), CLUSTER_DDP_HEARTBEAT=str(heartbeat.path)
    )
    phases, own = [], Own()
    try:
        with join_run(folder="nowhere") as run:
            slot = heartbeat.slots[run.world.local_rank]
            model: nn.Module = nn.Linear(3, 1)
            if run.world.world_size > 1:
                model = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def loss() -> Tensor:
                own.sums += 1
                return model(torch.ones(2, 3)).mean()

            run.resume(model, optimizer, SampleStream(16, 4, 0), total_steps=STEPS, also=own)
            begun = run.step
            while run.step < STEPS:
                run.begin_step()
                phases.append(slot.phase)
                if fail_at == (run.step, run.world.rank):
                    raise ValueError("this script is wrong")
                if stop_at == run.step:
                    os.kill(os.getpid(), signal.SIGUSR1)
                loss().backward()
                optimizer.step()
                own.calls += 1
                run.log(run.step + 1, {"train/loss": 1.0})
                if run.end_step():
                    break
                with run.evaluating():
                    phases.append(slot.phase)
                phases.append(slot.phase)
                run.evaluating()
                phases.append(slot.phase)
            reached = run.step
    except SystemExit as end:
        return end.code
    finally:
        heartbeat.unlink()
    return begun, reached, own.calls, own.sums.tolist(), phases, slot.phase


def test_stopped_script_goes_on_in_the_next_attempt(run: RunDirectory) -> None:
    [(begun, reached, *_, phases, last)] = run_ranks(script, 1, run.path, 0, 4)
    assert (begun, reached, last) == (0, 5, Phase.DONE)
    assert phases[:4] == [Phase.TRAINING, Phase.EVALUATING] * 2
    [(begun, reached, calls, sums, *_)] = run_ranks(script, 1, run.path, 1)
    assert (begun, reached, calls, sums) == (5, STEPS, STEPS, [STEPS] * 2)
    told = [(event["event"], event["step"], event["attempt"], event.get("reason")) for event in read_events(run)]
    asked = ("stop-requested", 5, 0, "time-limit")  # at any moment of the save before, which is in the background
    assert asked in told
    assert [event for event in told if event != asked] == [
        ("started", 0, 0, None), ("checkpoint", 3, 0, None), ("checkpoint", 5, 0, None),
        ("stopped", 5, 0, "time-limit"), ("resumed", 5, 1, None), ("checkpoint", 6, 1, None),
        ("checkpoint", 8, 1, None), ("completed", 8, 1, None),
    ]  # fmt: skip


def test_ranks_end_though_their_model_outlives_the_group(run: RunDirectory) -> None:
    results = run_ranks(script, 2, run.path, 0)
    assert [result[:4] for result in results] == [(0, STEPS, STEPS, [STEPS] * 2)] * 2


def test_failure_is_recorded_by_the_rank_that_failed_and_by_no_other(run: RunDirectory) -> None:
    assert run_ranks(script, 2, run.path, 0, None, (4, 1)) == [1, 1]
    failed = [event for event in read_events(run) if event["event"] == "failed"]
    assert [(event["rank"], event["step"], event["phase"]) for event in failed] == [(1, 4, "training")]
    assert failed[0]["error"] == "ValueError: this script is wrong"


def without_a_job(place: Path) -> Cause | None:
    """What a rank says about why it failed, if it could not read the job although it had already met the others."""
    heartbeat = HeartbeatFile.create(slots=4)
    os.environ.update(CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT="0", CLUSTER_DDP_HEARTBEAT=str(heartbeat.path))
    try:
        with join_run():
            pass
    except SystemExit:
        return heartbeat.slots[int(os.environ["LOCAL_RANK"])].cause
    finally:
        heartbeat.unlink()
    return None


def test_a_rank_that_fails_before_it_has_joined_says_whether_another_one_was_first(run: RunDirectory) -> None:
    run.job_file.write_text("name: [")
    assert sorted(run_ranks(without_a_job, 2, run.path)) == [Cause.FOLLOWS, Cause.PROGRAM]
    (failed,) = read_events(run)
    assert failed["cause"] == "program"


def without_with(place: Path) -> str:
    """A run whose block nothing holds open."""
    RunDirectory(place).attempt(0).path.mkdir(parents=True, exist_ok=True)
    os.environ.update(CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT="0")
    model = nn.Linear(2, 1)
    with pytest.raises(AttributeError, match="Write `with join_run\\(\\) as run:`"):
        join_run().resumable  # type: ignore[attr-defined]  # noqa: B018
    run = join_run().__enter__()
    with pytest.raises(TrainError, match="has ended, and nothing is saved after it"):
        run.steps(3, model=model, optimizer=torch.optim.SGD(model.parameters()))
    return str(LeaveBlock())


def test_a_block_that_nothing_holds_open_is_told_at_once(run: RunDirectory) -> None:
    (left,) = run_ranks(without_with, 1, run.path)
    assert "the block of `with join_run() as run:`" in left  # what a stop says where the loop is in no block
    (event,) = read_events(run)
    assert event["error"].startswith("nothing holds the block of join_run() open")


def in_a_thread(folder: Path) -> list[Any]:
    """How a block ends that is begun in another thread than the main one."""
    ends: list[Any] = []

    def begin() -> None:
        try:
            with join_run(folder):
                pass
        except BaseException as error:
            ends.append((type(error), str(error.__cause__)))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    return ends


def test_a_block_in_another_thread_than_the_main_one_is_refused_in_words(tmp_path: Path) -> None:
    (((kind, cause),),) = run_ranks(in_a_thread, 1, tmp_path)
    assert kind is SystemExit
    assert "this is not the main thread of the program" in cause
