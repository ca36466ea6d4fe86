"""What does a large run cost: files in an attempt, and the time that ``cluster-ddp status`` and ``logs`` take?

Run it from the repository or with the package installed::

    python benchmarks/large_run.py                                # 1, 64 and 512 nodes, 50 attempts
    python benchmarks/large_run.py --nodes 4096 --attempts 10     # a larger one
    python benchmarks/large_run.py --against ../older             # alternating with another checkout

The run is made up, in the state that a real one leaves: 8 ranks on each node, attempts that were preempted and queued
again, the last of them running; each node program has its own events, log and environment report. squeue is a stand-in
that answers at once. To reach: ``status`` in 0.4 s with 512 nodes and 50 attempts, and three files for each node of an
attempt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from login_node import SAVE_EVERY, STEPS, MadeRun, call, make_stand_ins

TARGET_SECONDS = 0.4
TARGET_NODES = 512
PROCS = 8
COMMANDS = ("status", "logs --errors")


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


def measure(nodes: int, attempts: int, checkouts: list[Path], rounds: int, folder: Path) -> bool:
    """Print the rows for a run of so many nodes; whether this checkout reaches what it has to."""
    make_stand_ins(folder / "bin", [make_large_run(folder / "runs", nodes, attempts)])
    (run,) = (folder / "runs").iterdir()
    files = sum(1 for _ in (run / "attempts/000").iterdir())
    reached = files <= 3 * nodes + 10
    print(f"{nodes:6} {attempts:8}   {files} files in an attempt", flush=True)
    measured: dict[tuple[str, Path], list[tuple[float, float, list[str]]]] = {}
    for number in range(rounds + 1):
        for command in COMMANDS:
            for checkout in checkouts:
                name, *options = command.split()
                figures = call(name, checkout, folder, run.name, *options)
                if number:  # the first of each fills caches
                    measured.setdefault((command, checkout), []).append(figures)
    for (command, checkout), rows in measured.items():
        wall, cpu = (statistics.median(row[column] for row in rows) for column in (0, 1))
        print(f"{nodes:6} {attempts:8}   {command:14}{wall:9.3f}{cpu:9.3f}   {checkout.name}", flush=True)
        if command == "status" and nodes <= TARGET_NODES and checkout == checkouts[0]:
            reached &= wall <= TARGET_SECONDS
    return reached


def main() -> int:
    """Measure, print, and exit with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64, TARGET_NODES])
    parser.add_argument("--attempts", type=int, default=50)
    parser.add_argument("--against", type=Path, nargs="*", default=[], metavar="CHECKOUT")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the run there, no more")
    options = parser.parse_args()
    repository = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(repository))
    if options.make:
        make_stand_ins(
            options.make / "bin", [make_large_run(options.make / "runs", options.nodes[-1], options.attempts)]
        )
        return 0
    checkouts = [repository, *(checkout.resolve() for checkout in options.against)]
    print(f"{'nodes':>6} {'attempts':>8}   {'command':14}{'wall':>9}{'CPU':>9}   medians of {options.rounds} rounds, s")
    reached = True
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory() as folder:
            reached &= measure(nodes, options.attempts, checkouts, options.rounds, Path(folder))
    print(f"to reach with {TARGET_NODES} nodes: {TARGET_SECONDS} s; {'reached' if reached else 'missed'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
