"""How long from the start to the first new step, and from a stop request to a durable checkpoint?

One run is made, stopped, and then resumed again and again; in turn with it the same model is started by a bare torchrun
that does what people write by hand: import torch, rendezvous, ``torch.load``, one step (`resume_task.py`)::

    python benchmarks/resume_time.py                      # here: two nodes of one rank on loopback
    python benchmarks/resume_time.py --slurm [--partition debug]    # on two nodes of a Slurm cluster

Here the clock starts with the command ``cluster-ddp resume``; under Slurm with the first line of the batch script. It
stops when rank 0's optimizer has made its first step. The folder of the runs (``--folder``) must be seen from all
nodes.

Printed are medians and the spread, where the time goes, the time from the stop file to the checkpoint's event, and the
steps that a stop and a rank killed with SIGKILL cost. To reach: 1.1 times the bare torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster_ddp.run.attempt import last_attempt, read_attempt, request_resume
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import CHECKPOINT, NODE_STARTED, RESUMED, read_events

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[1]
TASK = REPOSITORY / "benchmarks" / "resume_task.py"
NODES = 2
TIME_LIMIT = 300.0
SAVE_EVERY = 25
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",
}
BARE_SCRIPT = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --output={output}
date +%s.%N >{start}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'exec {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 --rdzv-backend=c10d \\
    --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$MASTER_ADDR:{port} --rdzv-conf=is_host=$((SLURM_NODEID == 0)) \\
    --local-addr=$SLURMD_NODENAME {script}'
"""


def wait_for(ready: Callable[[], T | None], what: str) -> T:
    """Ask until there is an answer.

    Raises
    ------
    TimeoutError
        When there is none for five minutes.
    """
    end = time.monotonic() + TIME_LIMIT
    while time.monotonic() < end:
        answer = ready()
        if answer:
            return answer
        time.sleep(0.02)
    raise TimeoutError(f"no {what} after {TIME_LIMIT:.0f} s")


class Marks:
    """The file in which rank 0 of either training says when it made its first step, and its pid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        self.seen = 0

    def next(self) -> tuple[float, int]:
        """Wait for the next line: Unix seconds and the pid."""

        def line() -> str | None:
            lines = self.path.read_text().splitlines(keepends=True)
            found = lines[self.seen] if len(lines) > self.seen else ""
            return found if found.endswith("\n") else None

        seconds, pid = wait_for(line, "first step").split()
        self.seen += 1
        return float(seconds), int(pid)


class Here:
    """Both trainings on this machine, two nodes of one rank each."""

    def __init__(self, folder: Path, bare_arguments: list[str]) -> None:
        self.folder = folder
        self.bare_arguments = bare_arguments

    def make_run(self, job: Path) -> RunDirectory:
        """Start a new run."""
        runs = self.folder / "runs"
        self.supervisor = self._start("local", str(job), "--nodes", str(NODES), "--procs", "1")
        found = wait_for(lambda: [path.parent for path in runs.glob("*/run.json")], "run directory")
        return RunDirectory(found[0])

    def resume(self, run: RunDirectory) -> float:
        """Resume the run; gives Unix seconds of the start."""
        begun = time.time()
        self.supervisor = self._start("resume", str(run.path))
        return begun

    def wait_end(self, run: RunDirectory) -> None:
        """Wait until the attempt is over."""
        self.supervisor.wait(TIME_LIMIT)

    def bare(self, marks: Marks, *arguments: str) -> float:
        """Run the bare training; gives the seconds from its start to its first step."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        begun = time.time()
        agents = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", "--nproc-per-node=1"),
                    *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
                    *(f"--rdzv-conf=is_host={int(node == 0)}", f"--rdzv-id={port}"),
                    *(str(TASK), *self.bare_arguments, *arguments),
                ],
                env=ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for node in range(NODES)
        ]
        first_step, _ = marks.next()
        for agent in agents:
            agent.wait(TIME_LIMIT)
        return first_step - begun

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "local.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cluster_ddp", *arguments],
                env={**ENVIRONMENT, "CLUSTER_DDP_RUNS": str(self.folder / "runs")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


class OnSlurm:
    """Both trainings on two nodes of a cluster. The clock starts with the first line of the batch script."""

    def __init__(self, folder: Path, bare_arguments: list[str], partition: str | None) -> None:
        self.folder = folder
        self.bare_arguments = bare_arguments
        self.partition = [f"--partition={partition}"] if partition else []
        self.start = folder / "start"

    def make_run(self, job: Path) -> RunDirectory:
        """Submit a new run."""
        partition = [f"--set=slurm.{option.lstrip('-')}" for option in self.partition]
        command = [sys.executable, "-m", "cluster_ddp", "submit", str(job), "--json", *partition]
        done = subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
        return RunDirectory(Path(json.loads(done.stdout.splitlines()[-1])["directory"]))

    def resume(self, run: RunDirectory) -> float:
        """Submit the run's own script once more, with a first line that takes the time."""
        request_resume(run, by="resume_time.py")
        lines = run.script.read_text().splitlines(keepends=True)
        first_command = next(at for at, line in enumerate(lines) if line.strip() and not line.startswith("#"))
        lines.insert(first_command, f"date +%s.%N >{shlex.quote(str(self.start))}\n")
        script = self.folder / "timed.sbatch"
        script.write_text("".join(lines))
        self.start.unlink(missing_ok=True)
        output = f"--output={run.path}/slurm-%j.out"
        subprocess.run(["sbatch", *self.partition, output, str(script), str(run.path)], env=ENVIRONMENT, check=True)
        return self._begun()

    def wait_end(self, run: RunDirectory) -> None:
        """Wait until the job has left the queue."""
        last = last_attempt(run)
        record = read_attempt(last) if last is not None else None
        assert record is not None and record.slurm_job_id is not None
        job = record.slurm_job_id

        def gone() -> bool:
            command = ["squeue", "--noheader", "--states=PENDING,RUNNING,COMPLETING", f"--jobs={job}"]
            return not subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()

        wait_for(gone, "end of the job")

    def bare(self, marks: Marks, *arguments: str) -> float:
        """Run the bare training; gives the seconds from the start of its script to its first step."""
        script = self.folder / "bare.sbatch"
        script.write_text(
            BARE_SCRIPT.format(
                nodes=NODES,
                start=shlex.quote(str(self.start)),
                output=self.folder / "bare.out",
                python=sys.executable,
                port=20000 + os.getpid() % 10000,
                script=shlex.join((str(TASK), *self.bare_arguments, *arguments)),
            )
        )
        self.start.unlink(missing_ok=True)
        subprocess.run(
            ["sbatch", "--wait", *self.partition, str(script)], env=ENVIRONMENT, check=True, timeout=TIME_LIMIT
        )
        first_step, _ = marks.next()
        return first_step - self._begun()

    def _begun(self) -> float:
        def written() -> str:
            return self.start.read_text().strip() if self.start.is_file() else ""

        return float(wait_for(written, "start of the script"))


@contextlib.contextmanager
def working_folder(chosen: Path | None) -> Iterator[Path]:
    """Give a temporary folder, inside the one that was chosen."""
    with tempfile.TemporaryDirectory(dir=chosen, prefix="resume-time-") as folder:
        yield Path(folder)


def event_time(run: RunDirectory, name: str, attempt: int, **fields: Any) -> float | None:
    """Give Unix seconds of the latest such event of an attempt."""
    wanted = {"event": name, "attempt": attempt, **fields}
    times = [event["time"] for event in read_events(run) if wanted.items() <= event.items()]
    return max(times) if times else None


def last_step(run: RunDirectory) -> int:
    """Give the last step in the metrics."""
    return max((json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()), default=0)


def last_checkpoint(run: RunDirectory) -> int:
    """Give the step of the newest checkpoint."""
    return max((int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")), default=0)


def stop(way: Here | OnSlurm, run: RunDirectory) -> float:
    """Stop the run by the command; gives the seconds from the stop file to the durable checkpoint."""
    attempt = last_attempt(run)
    assert attempt is not None
    command = [sys.executable, "-m", "cluster_ddp", "stop", str(run.path)]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=60)
    asked = run.attempt(attempt.number).stop_file.stat().st_mtime
    way.wait_end(run)
    durable = event_time(run, CHECKPOINT, attempt.number)
    assert durable is not None, "the stop left no checkpoint"
    return durable - asked


def lost_by_kill(way: Here | OnSlurm, run: RunDirectory, pid: int) -> int:
    """Kill rank 0 some steps after a checkpoint; gives the steps that have to be made again."""
    before = last_checkpoint(run)
    wait_for(lambda: last_checkpoint(run) > before, "checkpoint")
    wait_for(lambda: last_step(run) % SAVE_EVERY > SAVE_EVERY // 2, "step between two checkpoints")
    os.kill(pid, signal.SIGKILL)
    way.wait_end(run)
    return last_step(run) - last_checkpoint(run)


def show(name: str, values: list[float]) -> None:
    """Print a line of the table."""
    print(f"{name:58}{statistics.median(values):9.2f}{min(values):9.2f}{max(values):9.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights-mib", type=float, default=32, help="the checkpoint is three times as large")
    parser.add_argument("--folder", type=Path, help="where runs are made (default: the system's temporary folder)")
    parser.add_argument("--slurm", action="store_true", help="on a Slurm cluster instead of here")
    parser.add_argument("--partition", help="of the Slurm cluster")
    options = parser.parse_args()
    with working_folder(options.folder) as folder:
        measure(folder, options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Do all of it in a folder."""
    marks, bare_marks, weights = Marks(folder / "marks"), Marks(folder / "bare-marks"), folder / "bare.pt"
    arguments = [f"--weights-mib={options.weights_mib}", f"--mark={bare_marks.path}"]
    way = OnSlurm(folder, arguments, options.partition) if options.slurm else Here(folder, arguments)
    job = {
        "name": "resume",
        "runs_dir": str(folder / "runs"),
        "task": f"{TASK}:Heavy",
        "params": {"weights_mib": options.weights_mib, "mark": str(marks.path)},
        "slurm": {"nodes": NODES},
        "launch": {"procs_per_node": 1},
        "train": {"steps": 1_000_000, "batch_size": 8, "lr": 1e-4},
        "checkpoint": {"every_steps": SAVE_EVERY},
        "log": {"every_steps": 1, "wandb": {"mode": "disabled"}},
    }
    job_file = folder / "job.yaml"
    job_file.write_text(json.dumps(job))  # JSON is YAML

    run = way.make_run(job_file)
    marks.next()
    stop(way, run)
    way.bare(bare_marks, f"--save={weights}")
    ours: list[float] = []
    bare: list[float] = []
    ratios: list[float] = []
    node: list[float] = []
    ready: list[float] = []
    stops: list[float] = []
    for number in range(options.rounds):
        begun = way.resume(run)
        first_step, _ = marks.next()
        attempt = last_attempt(run)
        assert attempt is not None
        ours.append(first_step - begun)
        node.append((event_time(run, NODE_STARTED, attempt.number) or begun) - begun)
        ready.append((event_time(run, RESUMED, attempt.number) or begun) - begun)
        stops.append(stop(way, run))
        bare.append(way.bare(bare_marks, f"--load={weights}"))
        ratios.append(ours[-1] / bare[-1])
        print(f"  round {number + 1} of {options.rounds}", file=sys.stderr)
    after_stop = last_step(run) - last_checkpoint(run)
    way.resume(run)
    _, pid = marks.next()
    after_kill = lost_by_kill(way, run, pid)

    print(f"{'seconds':58}{'median':>9}{'fastest':>9}{'slowest':>9}   {options.rounds} rounds, {NODES} nodes x 1 rank")
    show("bare torchrun: start to first step", bare)
    show("cluster_ddp: start to first step", ours)
    show("    of it: to the node programs", node)
    show("    of it: to the restored state", ready)
    show("ratio (to reach: 1.1)", ratios)
    show(f"stop file to durable checkpoint ({3 * options.weights_mib:.0f} MiB)", stops)
    print(f"steps lost: by a stop {after_stop}; by a killed rank {after_kill} (a checkpoint every {SAVE_EVERY} steps)")


if __name__ == "__main__":
    main()
