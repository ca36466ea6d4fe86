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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import list_attempts, read_attempt
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
    """The file in which rank 0 of either training says when it made its first step, and where and who it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()
        self.seen = 0

    def next(self) -> tuple[float, str, int]:
        """Wait for the next line: Unix seconds, the node and the pid."""

        def line() -> str | None:
            lines = self.path.read_text().splitlines(keepends=True)
            found = lines[self.seen] if len(lines) > self.seen else ""
            return found if found.endswith("\n") else None

        seconds, node, pid = wait_for(line, "first step").split()
        self.seen += 1
        return float(seconds), node, int(pid)


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

    def kill(self, run: RunDirectory, node: str, pid: int) -> None:
        """Kill a rank."""
        os.kill(pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End what is still running when something has gone wrong."""
        self.supervisor.terminate()
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
        first_step, _, _ = marks.next()
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
        job = self._job(run)

        def gone() -> bool:
            command = ["squeue", "--noheader", "--states=PENDING,RUNNING,COMPLETING", f"--jobs={job}"]
            return not subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()

        wait_for(gone, "end of the job")

    def kill(self, run: RunDirectory, node: str, pid: int) -> None:
        """Kill a rank."""
        where = (f"--jobid={self._job(run)}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}")
        subprocess.run(["srun", *where, "kill", "-KILL", str(pid)], env=ENVIRONMENT, check=True, timeout=60)

    def abandon(self) -> None:
        """End what is still running when something has gone wrong."""
        for run in (self.folder / "runs").glob("*/run.json"):
            cancel = [sys.executable, "-m", "cluster_ddp", "cancel", str(run.parent)]
            subprocess.run(cancel, env=ENVIRONMENT, check=False, timeout=60)

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
        first_step, _, _ = marks.next()
        return first_step - self._begun()

    def _job(self, run: RunDirectory) -> str:
        record = read_attempt(list_attempts(run)[-1])
        assert record.slurm_job_id is not None
        return record.slurm_job_id

    def _begun(self) -> float:
        def written() -> str:
            return self.start.read_text().strip() if self.start.is_file() else ""

        return float(wait_for(written, "start of the script"))


def event_time(run: RunDirectory, name: str, attempt: int, **fields: Any) -> float | None:
    """Give Unix seconds of the latest such event of an attempt."""
    wanted = {"event": name, "attempt": attempt, **fields}
    times = [event["time"] for event in read_events(run) if wanted.items() <= event.items()]
    return max(times) if times else None


def last_step(run: RunDirectory) -> int:
    """Give the last step that rank 0 has trained: it notes its samples at once, its metrics a moment later."""
    files = run.path.glob("attempts/*/samples-rank0.jsonl")
    return max((json.loads(line)["step"] for file in files for line in file.read_text().splitlines()), default=0)


def last_checkpoint(run: RunDirectory) -> int:
    """Give the step of the newest checkpoint."""
    return max((int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")), default=0)


def stop(way: Here | OnSlurm, run: RunDirectory) -> float:
    """Stop the run by the command; gives the seconds from the stop file to the durable checkpoint."""
    attempt = list_attempts(run)[-1]
    command = [sys.executable, "-m", "cluster_ddp", "stop", str(run.path)]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=60)
    asked = run.attempt(attempt.number).stop_file.stat().st_mtime
    way.wait_end(run)
    durable = event_time(run, CHECKPOINT, attempt.number)
    assert durable is not None, "the stop left no checkpoint"
    return durable - asked


@dataclass(frozen=True)
class Times:
    """Seconds of one round."""

    ours: float
    to_nodes: float
    to_state: float
    to_durable: float
    bare: float


class Measurement:
    """The run and the bare training that are started in turn, in a folder that is thrown away."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.marks, self.bare_marks = Marks(folder / "marks"), Marks(folder / "bare-marks")
        self.weights = folder / "bare.pt"
        arguments = [f"--weights-mib={options.weights_mib}", f"--mark={self.bare_marks.path}"]
        self.way = OnSlurm(folder, arguments, options.partition) if options.slurm else Here(folder, arguments)
        self.job_file = folder / "job.yaml"
        job = {
            "name": "resume",
            "runs_dir": str(folder / "runs"),
            "task": f"{TASK}:Heavy",
            "params": {"weights_mib": options.weights_mib, "mark": str(self.marks.path)},
            "slurm": {"nodes": NODES},
            "launch": {"procs_per_node": 1},
            "requeue": {"max_requeues": 0},  # the benchmark resumes by itself
            "train": {"steps": 1_000_000, "batch_size": 8, "lr": 1e-4},
            "checkpoint": {"every_steps": SAVE_EVERY},
            "log": {"every_steps": 1, "sample_ids": True, "wandb": {"mode": "disabled"}},
        }
        self.job_file.write_text(json.dumps(job))  # JSON is YAML

    def prepare(self) -> RunDirectory:
        """Make both checkpoints."""
        run = self.way.make_run(self.job_file)
        self.marks.next()
        stop(self.way, run)
        self.way.bare(self.bare_marks, f"--save={self.weights}")
        return run

    def round(self, run: RunDirectory) -> Times:
        """Resume both once."""
        begun = self.way.resume(run)
        first_step, _, _ = self.marks.next()
        attempt = list_attempts(run)[-1]
        to_nodes = event_time(run, NODE_STARTED, attempt.number)
        to_state = event_time(run, RESUMED, attempt.number)
        assert to_nodes is not None and to_state is not None
        to_durable = stop(self.way, run)
        bare = self.way.bare(self.bare_marks, f"--load={self.weights}")
        return Times(first_step - begun, to_nodes - begun, to_state - begun, to_durable, bare)

    def lost_by_kill(self, run: RunDirectory) -> int:
        """Kill rank 0 some steps after a checkpoint; gives the steps that have to be made again."""
        self.way.resume(run)
        _, node, pid = self.marks.next()
        before = last_checkpoint(run)
        wait_for(lambda: last_checkpoint(run) > before, "checkpoint")
        wait_for(lambda: last_step(run) % SAVE_EVERY > SAVE_EVERY // 2, "step between two checkpoints")
        self.way.kill(run, node, pid)
        self.way.wait_end(run)
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

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="resume-time-") as folder:
        measurement = Measurement(Path(folder), options)
        try:
            run = measurement.prepare()
            rounds = [measurement.round(run) for _ in range(options.rounds)]
            after_stop = last_step(run) - last_checkpoint(run)
            after_kill = measurement.lost_by_kill(run)
        except BaseException:
            measurement.way.abandon()
            raise

    print(f"{'seconds':58}{'median':>9}{'fastest':>9}{'slowest':>9}   {options.rounds} rounds, {NODES} nodes x 1 rank")
    show("bare torchrun: start to first step", [times.bare for times in rounds])
    show("cluster-ddp: start to first step", [times.ours for times in rounds])
    show("    of it: to the node programs", [times.to_nodes for times in rounds])
    show("    of it: to the restored state", [times.to_state for times in rounds])
    show("ratio (to reach: 1.1)", [times.ours / times.bare for times in rounds])
    mib = 3 * options.weights_mib
    show(f"stop file to durable checkpoint ({mib:.0f} MiB)", [times.to_durable for times in rounds])
    print(f"steps lost: by a stop {after_stop}; by a killed rank {after_kill} (a checkpoint every {SAVE_EVERY} steps)")


if __name__ == "__main__":
    main()
