"""Whole ranks, as torchrun starts them: signals, exit statuses, events, and errors that name the setting to change."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from train_ranks import IS_DYNAMO_DEFERRED, rank_environments, start_whole_rank

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.node.heartbeat import STACKS_SIGNALS, HeartbeatFile, stacks_beside
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.runs import create_run

TASK = """
import os, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cluster_ddp.train import Task

RANK = int(os.environ.get("RANK", 0))

class T(Task):
    def __init__(self, pause=0.0):
        self.pause = pause
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    def train_data(self):
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())
    def loss(self, model, batch):
        time.sleep(self.pause)
        return F.cross_entropy(model(batch[0]), batch[1])
"""


class Ranks:
    """Ranks of one attempt, each a process of its own."""

    def __init__(
        self, run: RunDirectory, world_size: int, attempt: int = 0, heartbeat: HeartbeatFile | None = None
    ) -> None:
        self.run = run
        folder = run.attempt(attempt).path
        folder.mkdir()
        self.logs = [folder / f"log-{rank}" for rank in range(world_size)]
        self.processes = []
        for environment, log_file in zip(rank_environments(run, world_size, attempt), self.logs, strict=True):
            if heartbeat is not None:
                environment["CLUSTER_DDP_HEARTBEAT"] = str(heartbeat.path)
            with log_file.open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "cluster_ddp.train", str(run.path)],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=_ignore_signals,  # as the node program starts them
                    )
                )

    def wait_for_step(self, step: int) -> None:
        """Wait until this step is in metrics.jsonl."""
        until = time.monotonic() + 90
        while time.monotonic() < until:
            if any(f'"step": {number},' in self._metrics() for number in range(step, step + 50)):
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} is not reached: {[log.read_text() for log in self.logs]}")

    def _metrics(self) -> str:
        return self.run.metrics_file.read_text() if self.run.metrics_file.exists() else ""

    def wait(self, seconds: float = 90) -> list[int]:
        """Exit statuses; a rank that has not ended by then is killed and shown as -9."""
        until = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        for process in self.processes:
            process.kill()
        return [process.wait() for process in self.processes]


def to_the_end(run: RunDirectory, attempt: int = 0) -> list[str]:
    """Be two ranks of an attempt that nothing happens to; what each has printed."""
    folder = run.attempt(attempt).path
    folder.mkdir()
    logs = [folder / f"log-{rank}" for rank in range(2)]
    environments = rank_environments(run, 2, attempt)
    ranks = [start_whole_rank(environments[rank], run.path, logs[rank]) for rank in range(2)]
    for rank in ranks:
        rank.join(90)
        rank.kill()
        rank.join()
    said = [log.read_text() for log in logs]
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    return said


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def new_run(folder: Path, code: str = "", **sections: Any) -> RunDirectory:
    """A run of the task above with `code` put into its class."""
    file = folder / "task.py"
    file.write_text(TASK + textwrap.indent(textwrap.dedent(code), "    "))
    train = {"steps": 6, "global_batch": 8, **sections.pop("train", {})}
    log = {"every_steps": 1, **sections.pop("log", {})}
    spec = JobSpec.model_validate({"name": "t", "task": f"{file}:T", "train": train, "log": log, **sections})
    return create_run(spec, runs_dir=folder, via="local", script=None)


def names(run: RunDirectory) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_a_signal_saves_and_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    run = new_run(tmp_path, params={"pause": 0.02}, train={"steps": 150, "workers": 1})
    first = Ranks(run, 2)
    first.wait_for_step(3)
    for process in first.processes:
        process.send_signal(signal.SIGUSR1)
    assert first.wait() == [0, 0]
    stopped = read_events(run)[-1]
    assert (stopped["event"], stopped["reason"]) == ("stopped", "time-limit") and 3 <= stopped["step"] < 150
    assert (run.checkpoints / f"step-{stopped['step']:08d}").is_dir()
    to_the_end(run, attempt=1)
    assert names(run) == ["started", "stop-requested", "checkpoint", "stopped", "resumed", "checkpoint", "completed"]
    resumed = read_events(run)[4]
    assert resumed["step"] == stopped["step"] and (resumed["world_size"], resumed["total_steps"]) == (2, 150)


def test_the_heartbeat_stops_a_rank_and_sees_what_it_does(tmp_path: Path) -> None:
    heartbeat = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    run = new_run(tmp_path, params={"pause": 0.02}, train={"steps": 2000})
    ranks = Ranks(run, 1, heartbeat=heartbeat)
    ranks.wait_for_step(3)
    slot = heartbeat.slots[0]
    assert (slot.rank, slot.pid, slot.phase) == (0, ranks.processes[0].pid, Phase.TRAINING) and slot.step >= 3
    ranks.processes[0].send_signal(STACKS_SIGNALS[0])
    heartbeat.post_stop(1, "preemption")
    assert ranks.wait() == [0]
    assert slot.phase == Phase.DONE and read_events(run)[-1]["reason"] == "preemption"
    assert "in _train" in stacks_beside(heartbeat.path, 0).read_text()
    heartbeat.unlink()


def test_ranks_end_when_their_parent_does(tmp_path: Path) -> None:
    """A killed agent must not leave ranks behind: they save and end."""
    run = new_run(tmp_path, params={"pause": 0.02}, train={"steps": 20_000})
    run.attempt(0).path.mkdir()
    program = (
        f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-m', 'cluster_ddp.train', {str(run.path)!r}])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60
    while not run.metrics_file.exists() or not run.metrics_file.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while "stopped" not in names(run):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_rank_prints_and_writes(tmp_path: Path) -> None:
    """Guide 1's checklist: only rank 0 prints, writes metrics and checkpoints."""
    run = new_run(tmp_path)
    first, second = to_the_end(run)
    assert "step 6/6" in first and "loss" in first
    assert second == ""
    rows = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert [path.name.split("-")[:2] for path in run.events.iterdir()] == [["rank", "0"]]


@pytest.mark.parametrize(
    ("code", "sections", "phase", "error"),
    [
        ("def prepare(self): raise OSError('no network')", {}, "starting", "OSError: no network"),
        ("def model(self): return nn.Linear(4, 2).requires_grad_(False)", {}, "starting", "no trainable parameter"),
        (
            """
            def loss(self, model, batch):
                self.calls = getattr(self, "calls", 0) + 1
                if RANK == 1 and self.calls > 4:
                    raise ValueError("a bug in step 2")
                return model(batch[0]).mean()
            """,
            {},
            "training",
            "ValueError: a bug in step 2",
        ),
        (
            """
            def loss(self, model, batch):
                if RANK == 1:
                    torch.empty(1 << 60)
                return model(batch[0]).mean()
            """,
            {},
            "training",
            "lower the batch size",
        ),
        (
            """
            def loss(self, model, batch):
                return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            """,
            {},
            "training",
            "a tensor of shape (4,); return a scalar",
        ),
        (
            """
            def train_data(self):
                return [(torch.zeros(4), 0) if index % 3 else {"x": torch.zeros(4)} for index in range(64)]
            """,
            {},
            "training",
            "do not make a batch",
        ),
        (
            """
            def model(self):
                model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
                model.unused = nn.Linear(4, 4)
                model.forward = lambda inputs: model[2](model[1](model[0](inputs)))
                return model
            """,
            {},
            "training",
            "train.find_unused_parameters: true",
        ),
        (
            """
            def eval_data(self):
                return self.train_data()
            def evaluate(self, model, batch):
                return dict(accuracy=(model(batch[0]).argmax(1) == batch[1]).float())
            """,
            {"checkpoint": {"keep_best": {"metric": "val/f1"}}},
            "evaluating",
            "there is no val/f1; evaluate() of the task gives val/accuracy",
        ),
        (
            """
            def model(self):
                import os, time
                time.sleep(0.5 * int(os.environ["RANK"]))
                return nn.Identity()
            """,
            {},
            "starting",
            "no trainable parameter",
        ),
        (
            """
            def model(self):
                import os, time
                if os.environ["RANK"] == "1":
                    zero = int(os.environ["RANK_0"])
                    while os.path.exists(f"/proc/{zero}") and open(f"/proc/{zero}/stat").read().split()[2] != "Z":
                        time.sleep(0.05)
                return nn.Identity()
            """,
            {},
            "starting",
            "no trainable parameter",
        ),
        (
            """
            def model(self):
                import os, time
                if os.environ["RANK"] == "1":
                    zero = int(os.environ["RANK_0"])
                    while os.path.exists(f"/proc/{zero}") and open(f"/proc/{zero}/stat").read().split()[2] != "Z":
                        time.sleep(0.05)
                raise KeyError("missing part " + os.environ["RANK"])
            """,
            {},
            "starting",
            "missing part",
        ),
        ("", {"train": {"global_batch": 70}}, "starting", "64 samples, less than one global batch of 70"),
        ("", {"train": {"global_batch": 7}}, "starting", "cannot be divided among 2 ranks"),
        ("", {"checkpoint": {"keep_best": {"metric": "val/f1"}}}, "starting", "keep_best.metric: there is no val/f1"),
    ],
    ids=[
        "prepare",
        "nothing-to-train",
        "bug",
        "memory",
        "no-scalar",
        "structure",
        "unused",
        "metric-evaluated",
        "rank 1 half a second later",
        "rank 1 when rank 0 is gone",
        "rank 1 of something else when rank 0 is gone",
        "short",
        "indivisible",
        "metric",
    ],
)
def test_failures_are_told_once_and_end_all_ranks(
    tmp_path: Path, code: str, sections: dict[str, Any], phase: str, error: str
) -> None:
    run = new_run(tmp_path, code, **sections)
    folder = run.attempt(0).path
    folder.mkdir()
    files = [folder / f"log-{rank}" for rank in range(2)]
    environments = rank_environments(run, 2)
    ranks = [start_whole_rank(environments[0], run.path, files[0])]
    ranks += [start_whole_rank(environments[1] | {"RANK_0": str(ranks[0].pid)}, run.path, files[1])]
    for rank in ranks:
        rank.join(120)
        rank.kill()
        rank.join()
    ended = time.time()
    logs = [file.read_text() for file in files]
    assert [rank.exitcode for rank in ranks] == [1, 1], logs
    (failed,) = [event for event in read_events(run) if event["event"] == "failed"]
    assert ended - failed["time"] < 20  # the start before it takes as long as a busy machine needs
    assert error in failed["error"] and failed["phase"] == phase
    assert failed["rank"] in (0, 1) and failed["node"] == 3 and failed["host"]
    assert error in logs[failed["rank"]] and error not in logs[1 - failed["rank"]]
    assert f"ends because rank {failed['rank']} failed" in logs[1 - failed["rank"]]


def test_what_the_imports_made_is_never_looked_through_for_garbage_but_the_users_objects_are(tmp_path: Path) -> None:
    """Neither is a second spent, in each rank, on importing torch's compiler, if nothing compiles."""
    code = """
    def model(self):
        import gc, weakref
        class Cycle: pass
        cycle = Cycle()
        cycle.me, seen = cycle, weakref.ref(cycle)
        del cycle
        gc.collect()
        print("seen", gc.isenabled(), gc.get_freeze_count() > 100_000, seen() is None, flush=True)
        return nn.Linear(4, 2)
    def loss(self, model, batch):
        import sys
        print("compiler", "torch._dynamo.config" in sys.modules, flush=True)
        return F.cross_entropy(model(batch[0]), batch[1])
    """
    train = {"steps": 4, "ema_decay": 0.9, "clip_norm": 1.0}
    ranks = Ranks(new_run(tmp_path, code, train=train), 2)
    assert ranks.wait() == [0, 0], ranks.logs[0].read_text()
    said = ranks.logs[0].read_text()
    assert "seen True True True\n" in said
    assert set(re.findall(r"compiler (\w+)", said)) == {str(not IS_DYNAMO_DEFERRED)}
