"""Stopping: flags, agreement, and evaluations that give way."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Plain, StopAt, attentive, differences, final_state, job, new_run, train

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.run.events import read_events
from cluster_ddp.run.phase import Phase
from cluster_ddp.train import StopConsensus, StopSignals, Trainer
from cluster_ddp.train.ranks.process import Beat, RankProcess

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def test_a_signal_only_raises_a_flag() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        reasons = {"USR1": "time-limit", "TERM": "terminated", "INT": "person", "HUP": "time-limit"}
        for number, reason in reasons.items():
            now = 100.0
            stop = StopSignals(clock=lambda: now)  # noqa: B023 (the latest is meant)
            stop.install("HUP")
            assert stop.level == 0 and stop.reason is None
            signal.raise_signal(getattr(signal, f"SIG{number}"))
            assert (stop.level, stop.reason) == (1, reason)
            signal.raise_signal(signal.SIGTERM)  # the same request by another way
            assert (stop.level, stop.reason) == (1, reason)
            now += 2
            signal.raise_signal(signal.SIGTERM)  # somebody is in a hurry
            assert (stop.level, stop.reason) == (2, reason)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _compute_without_python() -> None:
    """Take long in a single call of C code, in which Python calls no handler of a signal."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def test_what_a_rank_has_forked_ends_when_it_is_terminated() -> None:
    """As the pools of Python end their workers, for which they then wait."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop = StopSignals()
    stop.install()
    try:
        helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        helper.start()
        assert helper.pid is not None
        os.kill(helper.pid, signal.SIGUSR1)  # to all processes of the group, as some sites warn
        helper.join(0.2)
        assert helper.is_alive()
        stuck = multiprocessing.get_context("fork").Process(target=_compute_without_python)
        stuck.start()
        time.sleep(0.2)
        for process in (helper, stuck):
            process.terminate()
            process.join(20)
            assert (process.exitcode, stop.level) == (-signal.SIGTERM, 0)
    finally:
        helper.kill()
        stuck.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_heartbeat_counts_and_alone_makes_it_urgent(tmp_path: Path) -> None:
    heartbeat = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    seconds = itertools.count(0.0, 5.0)
    stop = StopSignals(heartbeat, clock=lambda: next(seconds))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        stop.install()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.level, stop.reason) == (1, "terminated")
        heartbeat.post_stop(2, "preemption")
        assert (stop.level, stop.reason) == (2, "preemption")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        heartbeat.unlink()


class Preempted(StopSignals):
    """Wants to stop when its time has come."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.time = time.monotonic() + 0.5 if rank == 2 else float("inf")

    @property
    def level(self) -> int:
        return int(time.monotonic() > self.time)

    @property
    def reason(self) -> str | None:
        return "preemption" if self.level else None


def exchanges(seconds: float) -> tuple[list[int], int]:
    """Run steps of some length, rank 2 wanting to stop after 0.5 s; the steps at which ranks spoke, and the last."""
    rank = int(os.environ["RANK"])
    begun = time.monotonic()
    consensus = StopConsensus(Preempted(rank), lambda: True, rank=rank, world_size=3, interval=0.2)
    spoke = []
    for step in range(100_000):
        consensus.begin(step)
        time.sleep(seconds)
        decision = consensus.end(step)
        if decision.synced:
            spoke.append(step)
        if decision.level:
            assert decision.reason == "preemption" and decision.save
            break
    assert time.monotonic() - begun < 5
    return spoke, step


def test_all_ranks_stop_at_the_same_step_and_speak_seldom() -> None:
    for seconds in (0.001, 0.05):
        results = run_ranks(exchanges, 3, seconds)
        assert results[0] == results[1] == results[2]
        spoke, stopped = results[0]
        assert spoke[-1] == stopped
        # The first steps teach how long a step takes; from then on about every 0.2 s.
        assert len(spoke) <= 0.5 * stopped + 4 or seconds > 0.01


class SlowEvaluation(Plain):
    """Raises the flag in the middle of an evaluation."""

    def __init__(self, stop: StopAt | None = None) -> None:
        self.stop = stop
        self.batches = 0

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.batches += 1
        if self.stop is not None and self.batches == 3 and int(os.environ.get("RANK", 0)) == 0:
            self.stop.step = 0
        return super().evaluate(model, batch)


def abandoned(folder: Path) -> Any:
    from cluster_ddp.train import broadcast_object, is_main_process

    sections: dict[str, Any] = {
        "train": {"steps": 6, "global_batch": 4, "evaluate_every": "3 steps"},
        "log": {"every_steps": 1},
    }
    calm, _ = train(SlowEvaluation(), job(**sections))
    run = broadcast_object(new_run(folder, **sections) if is_main_process() else None)
    wish = StopAt()
    task = SlowEvaluation(wish)
    trainer = Trainer(job(**sections), task, run, process=attentive(wish))
    wish.trainer, wish.step = trainer, 1000
    outcome = trainer.run()
    counts = (outcome.completed, outcome.step, task.batches, trainer.state.counts.evaluated_step)
    again = SlowEvaluation()
    resumed, last = train(again, job(**sections), run, attempt=1)
    return counts, again.batches, last.completed, differences(final_state(calm), final_state(resumed)), run


def test_a_stop_abandons_an_evaluation_which_is_done_again(tmp_path: Path) -> None:
    (counts, batches, completed, different, run), _ = run_ranks(abandoned, 2, tmp_path)
    # Of 23 samples in batches of 2, each rank has 6; the third raises the flag.
    assert counts == (False, 3, 3, -1)
    assert batches == 12 and completed and different == []
    names = [event["event"] for event in read_events(run) if event["event"] != "warning"]
    stopped = ["started", "stop-requested", "checkpoint", "stopped"]
    assert names == [*stopped, "resumed", "checkpoint", "checkpoint", "completed"], "one holds what was evaluated"


def test_a_stop_in_the_last_step_is_no_end_without_its_evaluation(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 4, "global_batch": 24, "evaluate_every": "end"}}
    run = new_run(tmp_path, **sections)
    _, outcome = train(Plain(), job(**sections), run, stop_at=4)
    assert (outcome.completed, outcome.step, outcome.reason) == (False, 4, "time-limit")
    trainer, outcome = train(Plain(), job(**sections), run, attempt=1)
    assert outcome.completed and "val/accuracy" in outcome.metrics and trainer.step == 4


def test_more_epochs_go_on_from_a_completed_run(tmp_path: Path) -> None:
    run = new_run(tmp_path, train={"epochs": 1, "global_batch": 24})
    train(Plain(), job(train={"epochs": 1, "global_batch": 24}), run)
    more = job(train={"epochs": 3, "global_batch": 24})
    longer, outcome = train(Plain(), more, run, attempt=1)
    whole, _ = train(Plain(), more)
    assert outcome.step == 6 and differences(final_state(longer), final_state(whole)) == []


def test_a_rank_says_on_the_heartbeat_what_it_does(tmp_path: Path) -> None:
    heartbeat = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    phases: list[Phase] = []

    class Noting(Beat):
        def enter(self, phase: Phase) -> None:
            super().enter(phase)
            phases.append(heartbeat.slots[0].phase)

    spec = job(train={"steps": 2, "global_batch": 24, "evaluate_every": "end"})
    trainer = Trainer(spec, Plain(), process=RankProcess(beat=Noting(heartbeat.slots[0])))
    trainer.run()
    assert heartbeat.slots[0].step == 2 and heartbeat.slots[0].beat_ns > 0
    order = [phases[0], *(after for before, after in itertools.pairwise(phases) if after != before)]
    end = [Phase.STOPPING, Phase.SAVING, Phase.STOPPING, Phase.DONE]
    assert order == [Phase.READY, Phase.TRAINING, Phase.EVALUATING, Phase.TRAINING, *end]
    heartbeat.unlink()


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    class Slow(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            time.sleep(0.03)
            return super().loss(model, batch)

    sections: dict[str, Any] = {
        "train": {"steps": 20, "global_batch": 24, "evaluate_every": "end"},
        "checkpoint": {"every_minutes": 0.15 / 60, "keep_last": 100},
    }
    run = new_run(tmp_path, **sections)
    begun = time.monotonic()
    train(Slow(), job(**sections), run)
    seconds = time.monotonic() - begun
    steps = [event["step"] for event in read_events(run) if event["event"] == "checkpoint"]
    assert 3 <= len(steps) <= seconds / 0.15 + 2 and len(steps) < 20 and steps[-1] == 20


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_by_the_step(tmp_path: Path, world_size: int) -> None:
    run_ranks(_save_often, world_size, tmp_path)
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000002", "step-00000004", "step-00000005",
    ]  # fmt: skip


def _save_often(folder: Path) -> None:
    from cluster_ddp.train import broadcast_object, is_main_process

    sections: dict[str, Any] = {"train": {"steps": 5, "global_batch": 24}, "checkpoint": {"every_steps": 2}}
    run = broadcast_object(new_run(folder, **sections) if is_main_process() else None)
    train(Plain(), job(**sections), run)
    assert torch.get_num_threads() == 1
