"""How long do ``cluster-ddp status`` and ``list`` take in a folder of many runs, and ``sweep`` of as many elements?

Run it from the repository or with the package installed::

    python benchmarks/login_node.py                             # 5 rounds at 10, 100 and 1,000 runs
    python benchmarks/login_node.py --against ../older          # alternating with another checkout
    python benchmarks/login_node.py --counts 10000              # also of a sweep, the most elements that it may have
    python benchmarks/login_node.py --make RUNS --counts 1000   # only makes the runs, to look at or to profile

The runs are made up, in the state that real ones leave: attempts that were preempted and queued again, events of
several writers, 300 lines of metrics, checkpoints; three in five are complete, the others in every other state. squeue
and sacct are stand-ins that answer at once and count their calls. It prints medians of the wall-clock time and of the
CPU time. To reach, at 1,000 runs: 0.8 s, one call of squeue and at most one of sacct; and of a sweep, prepared and
submitted: 2 s, one call of sbatch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGET_SECONDS = 0.8  # at `TARGET_RUNS`
TARGET_RUNS = 1_000
COMMANDS = ("status", "list")
TARGET_SWEEP_SECONDS = 2.0  # of as many elements
SWEEP_JOB = "name: {}\ntask: cluster_ddp.tasks.digits:Digits\nslurm: {{nodes: 2}}\ntrain: {{epochs: 20}}\n"
STEPS = 3_000
LOG_EVERY, SAVE_EVERY, VALIDATE_EVERY = 10, 100, 200
SECONDS_PER_STEP = 0.5
BATCH = 256
KEPT_CHECKPOINTS = 3
ENDINGS = (
    *["completed"] * 12, "failed", "failed", "stopped", "lost", "running", "requeued", "pending", "cancelled",
)  # fmt: skip
"""How the runs end, in turn."""


@dataclass
class MadeRun:
    """A run that is being made up: its folder, its clock, its place in training."""

    path: Path
    job_id: str
    clock: float
    draw: random.Random
    step: int = 0

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

    def end(self, number: int, outcome: str) -> None:
        """End an attempt in order."""
        self.clock += 5
        for node in range(2):
            self.say(f"node-{node}", "node-finished", number, node=node, outcome=outcome)
        name = f"attempts/{number:03d}/attempt.json"
        self.write(name, {**json.loads((self.path / name).read_text()), "ended": self.clock})

    def _measured(self, attempt: int) -> dict[str, float]:
        loss = 4 / (1 + self.step / 300) + self.draw.random() / 10
        row = {"step": self.step, "samples": self.step * BATCH, "epoch": self.step // 1_000, "attempt": attempt}
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
        self.write(f"checkpoints/step-{self.step:08d}/manifest.json", {**manifest, "shards": shards}, indent=1)
        old = self.path / f"checkpoints/step-{self.step - KEPT_CHECKPOINTS * SAVE_EVERY:08d}"
        if old.exists():
            (old / "manifest.json").unlink()
            old.rmdir()


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


def make_stand_ins(folder: Path, queue: list[str]) -> None:
    """Put a squeue that knows these jobs, and a sacct that knows none, into a folder; each notes its calls."""
    folder.mkdir()
    (folder / "queue").write_text("".join(queue))
    answers = {"squeue": f"cat {folder}/queue", "sacct": "", "sbatch": "echo 7", "scontrol": "echo MaxArraySize=100000"}
    for name, answer in answers.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\necho {name} >>{folder}/calls\n{answer}\n")
        program.chmod(0o755)


def call(command: str, checkout: Path, folder: Path, *arguments: str) -> tuple[float, float, list[str]]:
    """Wall-clock and CPU seconds of a command of a checkout, and what was called of Slurm's."""
    calls = folder / "bin" / "calls"
    calls.write_text("")
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "CLUSTER_DDP_RUNS": str(folder / "runs"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    begin, before = time.perf_counter(), os.times()
    words = (sys.executable, "-m", "cluster_ddp", command, *arguments)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    seconds, after = time.perf_counter() - begin, os.times()
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu, calls.read_text().split()


def measure(count: int, checkouts: list[Path], rounds: int, folder: Path) -> bool:
    """Print the table's rows for so many runs; whether this checkout reaches what it has to."""
    make_stand_ins(folder / "bin", make_runs(folder / "runs", count))
    reached = True
    measured: dict[tuple[str, Path], list[tuple[float, float, list[str]]]] = {}
    for number in range(rounds + 1):
        for command in COMMANDS:
            for checkout in checkouts:
                figures = call(command, checkout, folder)
                if number:  # the first of each fills caches
                    measured.setdefault((command, checkout), []).append(figures)
    for (command, checkout), figures in measured.items():
        wall, cpu = (statistics.median(row[column] for row in figures) for column in (0, 1))
        calls = figures[-1][2]
        asked = f"{calls.count('squeue')} squeue, {calls.count('sacct')} sacct"
        print(f"{count:6} {command:8}{wall:9.3f}{cpu:9.3f}   {asked:20} {checkout.name}", flush=True)
        if count >= TARGET_RUNS and checkout == checkouts[0]:
            reached &= wall <= TARGET_SECONDS and calls.count("squeue") <= 1 and calls.count("sacct") <= 1
    return reached


def measure_sweep(count: int, checkout: Path, rounds: int, folder: Path) -> bool:
    """Print the rows for a sweep of so many elements; whether it reaches what it has to."""
    make_stand_ins(folder / "bin", [])
    seeds = "train.seed=" + ",".join(map(str, range(count)))
    walls = {}
    for title, options in (("dry run", ("--dry-run",)), ("sweep", ())):
        figures = []
        for number in range(rounds + 1):  # the first of each fills caches
            (folder / "job.yaml").write_text(SWEEP_JOB.format(f"round-{number}"))  # another sweep each time
            figures.append(call("sweep", checkout, folder, "job.yaml", "--grid", seeds, "--no-check", *options))
        wall, cpu = (statistics.median(row[column] for row in figures[1:]) for column in (0, 1))
        calls = figures[-1][2]
        print(f"{count:6} {title:8}{wall:9.3f}{cpu:9.3f}   {calls.count('sbatch')} sbatch", flush=True)
        walls[title] = wall
    return count < TARGET_RUNS or (walls["sweep"] <= TARGET_SWEEP_SECONDS and calls.count("sbatch") == 1)


def make_runs(folder: Path, count: int) -> list[str]:
    """Make runs up; the lines of squeue about those of their jobs that are in its queue."""
    lines = [make_run(folder, index) for index in range(count)]
    return [line for line in lines if line is not None]


def main() -> int:
    """Measure, print, and exit with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, TARGET_RUNS], metavar="RUNS")
    parser.add_argument("--against", type=Path, nargs="*", default=[], metavar="CHECKOUT")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the runs and the stand-ins there, no more")
    options = parser.parse_args()

    repository = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(repository))
    if options.make:
        make_stand_ins(options.make / "bin", make_runs(options.make / "runs", options.counts[-1]))
        return 0
    checkouts = [repository, *(checkout.resolve() for checkout in options.against)]
    print(f"{'runs':>6} {'command':8}{'wall':>9}{'CPU':>9}   medians in seconds of {options.rounds} rounds")
    reached = True
    for count in options.counts:
        with tempfile.TemporaryDirectory() as folder:
            reached &= measure(count, checkouts, options.rounds, Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            reached &= measure_sweep(count, repository, options.rounds, Path(folder))
    if max(options.counts) >= TARGET_RUNS:
        targets = f"{TARGET_SECONDS} s, and of a sweep {TARGET_SWEEP_SECONDS} s"
        print(f"to reach at {TARGET_RUNS:,} runs: {targets}; {'reached' if reached else 'missed'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
