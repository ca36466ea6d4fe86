"""Runs made up in the state that real ones leave, and Slurm's commands as stand-ins: what the benchmarks look at.

The runs of a folder have attempts that were preempted and queued again, events of several writers, 300 lines of
metrics, checkpoints; three in five are complete, the others in every other state. A large run has 8 ranks on each node,
and its last attempt is alive. squeue, sacct and sbatch answer at once and count their calls; ``sbatch
--test-only``, which submits nothing, has a name of its own there.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STEPS = 3_000
LOG_EVERY, SAVE_EVERY, VALIDATE_EVERY = 10, 100, 200
SECONDS_PER_STEP = 0.5
BATCH = 256
KEPT_CHECKPOINTS = 3
PROCS = 8  # of a node of a large run
RESTED_SECONDS = 3_600  # since the last of the runs changed
ENDINGS = (
    *["completed"] * 12, "failed", "failed", "stopped", "lost", "running", "requeued", "pending", "cancelled",
)  # fmt: skip
"""How the runs end, in turn."""

Figures = tuple[float, float, list[str]]
"""Wall-clock and CPU seconds of a command, and what it called of Slurm's."""


@dataclass
class MadeRun:
    """A run that is being made up: its folder, its clock, its place in training."""

    path: Path
    job_id: str
    clock: float
    draw: random.Random
    step: int = 0
    manifests: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # of the checkpoints that are kept, by their steps

    def write(self, name: str, value: Any, *, indent: int | None = 2) -> None:
        """Write a JSON file of the run, as the package indents it."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=indent) + "\n")

    def append(self, name: str, **fields: Any) -> None:
        """Append a line to a file of the run."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def say(self, writer: str, event: str, attempt: int | None, **fields: Any) -> None:
        """Append an event."""
        self.append(f"events/{writer}.jsonl", time=self.clock, event=event, attempt=attempt, **fields)

    def attempt(self, number: int, until: int) -> None:
        """Train up to a step in a new attempt."""
        from cluster_ddp.run.attempt_record import AttemptRecord
        from cluster_ddp.run.lineage import Origin
        from cluster_ddp.run.liveness import ProcessIdentity

        host = f"node{self.draw.randrange(64):03d}"
        self.clock += self.draw.uniform(60, 3_600)  # in the queue
        process = ProcessIdentity(host, self.draw.randrange(2, 1 << 22), "another-boot", "pid:[4026531836]", "123456")
        self.step = self.step // SAVE_EVERY * SAVE_EVERY
        origin = Origin(self.step, f"{self.draw.getrandbits(128):032x}") if number else Origin(None)
        record = AttemptRecord(number, self.clock, process, self.job_id, number, nodes=2, procs=4)
        self.write(f"attempts/{number:03d}/attempt.json", record.to_json())
        self.write(f"attempts/{number:03d}/origin.json", asdict(origin))
        for node in range(2):
            self.say(f"node-{node}", "node-started", number, node=node, host=host, pid=self.draw.randrange(2, 1 << 22))
        self.clock += 20
        known = {"step": self.step, "world_size": 8, "total_steps": STEPS}
        self.say("rank-0", "resumed" if number else "started", number, **known, training="8 ranks, global batch 256")
        lines = []
        while self.step < until:
            self.step += LOG_EVERY
            self.clock += LOG_EVERY * SECONDS_PER_STEP
            lines.append(json.dumps(self._measured(number)) + "\n")
            if self.step % SAVE_EVERY == 0:
                self._save(number)
        with (self.path / "metrics.jsonl").open("a") as file:
            file.writelines(lines)
        self._keep()

    def end(self, number: int, outcome: str) -> None:
        """End an attempt in order."""
        self.clock += 5
        for node in range(2):
            self.say(f"node-{node}", "node-finished", number, node=node, outcome=outcome)
        name = f"attempts/{number:03d}/attempt.json"
        self.write(name, {**json.loads((self.path / name).read_text()), "ended": self.clock})

    def _measured(self, attempt: int) -> dict[str, float]:
        loss = 4 / (1 + self.step / 300) + self.draw.random() / 10
        row: dict[str, float] = {
            "step": self.step,
            "samples": self.step * BATCH,
            "epoch": self.step // 1_000,
            "attempt": attempt,
        }
        row |= {"time": self.clock, "train/loss": loss, "lr": 3e-4 * (1 - self.step / STEPS)}
        row |= {"samples_per_second": 500 + self.draw.random(), "seconds_per_step": 0.5 + self.draw.random() / 100}
        row["data_wait"] = self.draw.random() / 50
        if self.step % VALIDATE_EVERY == 0:
            row |= {"val/loss": loss * 1.1, "val/accuracy": 1 / (1 + loss)}
        return row

    def _save(self, attempt: int) -> None:
        place = {"step": self.step, "samples": self.step * BATCH}
        self.say("rank-0", "checkpoint", attempt, **place, seconds=self.draw.uniform(1, 3))
        manifest = {"format": 2, "run_id": self.path.name, **place, "epoch": 0, "attempt": attempt, "world_size": 8}
        shards = {f"rank-{rank}.safetensors": {"bytes": 1 << 28, "xxh3": "0" * 32} for rank in range(8)}
        self.manifests[self.step] = {**manifest, "shards": shards}
        self.manifests.pop(self.step - KEPT_CHECKPOINTS * SAVE_EVERY, None)

    def _keep(self) -> None:
        """Have those checkpoints in the run that are kept, and no others."""
        for old in list((self.path / "checkpoints").iterdir()):
            (old / "manifest.json").unlink()
            old.rmdir()
        for step, manifest in self.manifests.items():
            self.write(f"checkpoints/step-{step:08d}/manifest.json", manifest, indent=1)


def make_run(folder: Path, index: int) -> str | None:
    """Make a run up; the line that squeue has about its job, None when it has none any more."""
    from cluster_ddp.run.record import RunRecord, slurm_comment

    draw = random.Random(index)
    ending = ENDINGS[index % len(ENDINGS)]
    created = time.time() - 10 * 86_400 + 60 * index
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(created))
    run = MadeRun(folder / f"digits-{stamp}-{draw.getrandbits(16):04x}", str(100_000 + index), created, draw)
    for name in ("events", "attempts", "checkpoints"):
        (run.path / name).mkdir(parents=True)
    versions = {"python": "3.11.7", "cluster_ddp": "0.1.0", "torch": "2.13.0", "numpy": "2.1.0", "xxhash": "3.5.0"}
    identity = RunRecord(run.path.name, "digits", created, "sbatch", f"{draw.getrandbits(48):012x}", (run.job_id,))
    run.write("run.json", {**asdict(identity), "versions": versions, "nodes": 2, "procs": 4, "global_batch": BATCH})
    run.say("login-login1", "submitted", None, via="sbatch", slurm_job_id=run.job_id)
    queued = f"{run.job_id}|{run.job_id}|{{}}||{{}}|{slurm_comment(run.path.name)}\n"
    if ending == "pending":
        return queued.format("PENDING", "Priority")
    requeues = 1 + draw.randrange(3)
    for number in range(requeues):
        run.attempt(number, STEPS * (number + 1) // (requeues + 1) // LOG_EVERY * LOG_EVERY)
        run.say("rank-0", "stopped", number, step=run.step, reason="preemption")
        run.end(number, "stopped")
        run.say(f"batch-{run.job_id}", "requeued", number, reason="stopped: preemption")
    if ending == "requeued":
        return queued.format("PENDING", "BeginTime")
    run.attempt(requeues, STEPS if ending == "completed" else STEPS - 500)
    if ending == "running":
        return queued.format("RUNNING", "None")
    if ending == "completed":
        run.say("rank-0", "completed", requeues, step=STEPS, samples=STEPS * BATCH)
    elif ending == "failed":
        told = {"rank": 3, "node": 0, "host": "node007", "error": "ValueError: the loss is NaN", "step": run.step}
        run.say("rank-3", "failed", requeues, **told, phase="training")
        run.say("node-0", "rank-failed", requeues, **told)
    elif ending == "stopped":
        run.write(f"attempts/{requeues:03d}/stop", {"reason": "person", "level": 1, "by": "me", "time": run.clock})
        run.say("rank-0", "stopped", requeues, step=run.step, reason="person", by="me")
    elif ending == "cancelled":
        run.say("login-login1", "cancelled", requeues, by="me@login1")
    if ending != "lost":
        run.end(requeues, ending)
    return None


def make_runs(folder: Path, count: int) -> list[str]:
    """Make runs up; the lines of squeue about those of their jobs that are in its queue."""
    lines = [make_run(folder, index) for index in range(count)]
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - RESTED_SECONDS, time.time() - RESTED_SECONDS))
    return [line for line in lines if line is not None]


def make_large_run(folder: Path, nodes: int, attempts: int) -> str:
    """Make a run up whose last attempt is alive; the line that squeue has about its job."""
    from cluster_ddp.run.attempt_record import AttemptRecord, end_attempt
    from cluster_ddp.run.condense import write_digest
    from cluster_ddp.run.directory import RunDirectory
    from cluster_ddp.run.lineage import Origin
    from cluster_ddp.run.liveness import ProcessIdentity
    from cluster_ddp.run.record import RunRecord, slurm_comment

    run = MadeRun(folder / "large-20260101-000000-abcd", "4711", time.time() - attempts * 4_000, random.Random(1))
    for name in ("events", "attempts", "checkpoints"):
        (run.path / name).mkdir(parents=True)
    identity = RunRecord(run.path.name, "large", run.clock, "sbatch", "0" * 12, (run.job_id,))
    run.write("run.json", {**asdict(identity), "nodes": nodes, "procs": PROCS, "global_batch": 8 * nodes * PROCS})
    run.say("login-login1", "submitted", None, via="sbatch", slurm_job_id=run.job_id)
    told: dict[int, list[str]] = {node: [] for node in range(nodes)}
    directory = RunDirectory(run.path)
    for number in range(attempts):
        run.clock += 600
        process = ProcessIdentity("node0000", 4_711, "another-boot", "pid:[4026531836]", "123456")
        record = AttemptRecord(number, run.clock, process, run.job_id, number, nodes=nodes, procs=PROCS)
        run.write(f"attempts/{number:03d}/attempt.json", record.to_json())
        run.write(f"attempts/{number:03d}/origin.json", asdict(Origin(run.step, "0" * 32) if number else Origin(None)))
        place = {"step": run.step, "world_size": nodes * PROCS, "total_steps": STEPS * attempts}
        run.say("rank-0", "resumed" if number else "started", number, **place)
        for _ in range(5):
            run.step, run.clock = run.step + SAVE_EVERY, run.clock + 600
            run.say("rank-0", "checkpoint", number, step=run.step, samples=run.step * 8 * nodes * PROCS, seconds=2.0)
        alive = number == attempts - 1
        for node in range(nodes):
            (run.path / f"attempts/{number:03d}/node-{node}.log").write_text(f"[rank {node * PROCS}] step {run.step}\n")
            run.write(f"attempts/{number:03d}/environment-{node}.json", {"node": node, "variables": {}})
            about = {"attempt": number, "node": node, "host": f"node{node:04d}"}
            started = {"time": run.clock - 3_000, "event": "node-started", **about, "procs": PROCS, "script": False}
            finished = {"time": run.clock, "event": "node-finished", **about, "outcome": "stopped", "step": run.step}
            told[node] += [json.dumps(event) for event in ((started,) if alive else (started, finished))]
        if not alive:
            run.say("rank-0", "stopped", number, step=run.step, reason="preemption")
            run.say(f"batch-{run.job_id}", "requeued", number, reason="stopped: preemption")
        for node in range(nodes):
            with (run.path / f"events/node-{node}.jsonl").open("a") as file:
                file.writelines(f"{line}\n" for line in told[node])
            told[node].clear()
        if not alive:
            end_attempt(directory.attempt(number))
            write_digest(directory)
    (run.path / f"checkpoints/step-{run.step:08d}").mkdir()
    run.append("metrics.jsonl", step=run.step, samples=1, epoch=0, attempt=attempts - 1, time=run.clock, loss=1.0)
    return f"{run.job_id}|{run.job_id}|RUNNING||None||{slurm_comment(run.path.name)}\n"


def make_stand_ins(folder: Path, queue: list[str]) -> None:
    """Put a squeue that knows these jobs, and a sacct that knows none, into a folder; each notes its calls."""
    folder.mkdir()
    (folder / "queue").write_text("".join(queue))
    answers = {"squeue": f"cat {folder}/queue", "sacct": "", "sbatch": "echo 7", "scontrol": "echo MaxArraySize=100000"}
    for name, answer in answers.items():
        program = folder / name
        trial = f'[ "$1" = --test-only ] && {{ echo {name}--test-only >>{folder}/calls; exit; }}\n'
        program.write_text(f"#!/bin/sh\n{trial}echo {name} >>{folder}/calls\n{answer}\n")
        program.chmod(0o755)


def call(words: Sequence[str], checkout: Path, folder: Path) -> tuple[Figures, str]:
    """What a command of a checkout's ``cluster-ddp`` takes, and what it prints."""
    return ask((sys.executable, "-m", "cluster_ddp", *words), checkout, folder)


def ask(words: Sequence[str], checkout: Path, folder: Path) -> tuple[Figures, str]:
    """What a program takes on that login node, and what it prints."""
    calls = folder / "bin" / "calls"
    calls.write_text("")
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "CLUSTER_DDP_RUNS": str(folder / "runs"),
        "CLUSTER_DDP_CONFIG": str(folder / "site.yaml") if (folder / "site.yaml").exists() else "",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begin, before = time.perf_counter(), os.times()
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    seconds, after = time.perf_counter() - begin, os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(words)[:200]} failed:\n{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return (seconds, cpu, calls.read_text().split()), done.stdout
