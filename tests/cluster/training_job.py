"""A run of the digits on the test cluster: submitted as a person would, watched, and waited for."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from login_node import OVER
from same_training import lines
from slurm_cluster import SlurmCluster

HERE = Path(__file__).parent
SAMPLES = 1442
GLOBAL_BATCH = 48
STEPS_PER_EPOCH = 31  # the last one is smaller: drop_last is off
EPOCHS = 2
STEPS = EPOCHS * STEPS_PER_EPOCH
AFTER_A_WHILE = """
import runpy, sys, time
now, later = time.time, float(sys.argv.pop(1))
time.time = lambda: now() + later
runpy.run_module("cluster_ddp", run_name="__main__")
"""
PATIENCE = 180  # a start has taken 150 s on two cores with a load of 50; where all is well, nothing waits so long


@dataclass
class TrainingJob:
    """A submitted run.

    Attributes
    ----------
    job:
        Slurm's job id.
    run:
        The run directory.
    brake:
        The file that makes training slow as long as it exists.
    """

    cluster: SlurmCluster
    job: int
    run: Path
    brake: Path

    def rows(self) -> list[dict[str, Any]]:
        metrics = self.run / "metrics.jsonl"
        return lines(metrics) if metrics.exists() else []

    def wait_for_step(self, step: int, *, attempt: int = 0, timeout: float = PATIENCE) -> None:
        """Wait until an attempt has trained and logged this step."""
        self.cluster.wait_for(
            lambda: any(row["step"] >= step and row["attempt"] >= attempt for row in self.rows()) or self._over(),
            timeout,
            f"step {step} of attempt {attempt}\n{self.story()}",
        )
        assert not self._over(), f"the job ended before step {step} of attempt {attempt}\n{self.story()}"

    def _over(self) -> bool:
        return self.cluster.state(self.job) in OVER

    def wait_for_restart(self, number: int, *, timeout: float = PATIENCE) -> None:
        """Wait until Slurm has requeued the job so many times."""
        self.cluster.wait_for(
            lambda: int(self.cluster.job_info(self.job).get("Restarts", -1)) >= number or self._over(),
            timeout,
            f"restart {number} of job {self.job}\n{self.story()}",
        )
        restarts = int(self.cluster.job_info(self.job)["Restarts"])
        assert restarts == number, f"{restarts} restarts, not {number}\n{self.story()}"

    def full_speed(self) -> None:
        """Release the brake."""
        self.brake.unlink()

    def finish(self, *, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait for the job to complete; returns what ``status --json`` says then."""
        self.cluster.wait_for(self._over, timeout, f"job {self.job} is over\n{self.story()}")
        state = self.cluster.state(self.job)
        assert state in self.names_of("COMPLETED"), f"job {self.job} is {state}\n{self.story()}"
        return self.status()

    def stays_ended(self, state: str, *, restarts: int, timeout: float = PATIENCE) -> None:
        """The job ends in the state after so many restarts, and is not queued again."""

        def ended() -> bool:
            info = self.cluster.job_info(self.job)
            assert int(info["Restarts"]) == restarts, f"it was started again\n{self.story()}"
            return info["JobState"] not in ("RUNNING", "COMPLETING")

        self.cluster.wait_for(ended, timeout, f"job {self.job} is over\n{self.story()}")
        time.sleep(3)
        assert ended() and self.cluster.state(self.job) in self.names_of(state), self.story()
        assert self.job not in self.cluster.queue()

    def names_of(self, state: str) -> set[str]:
        """What Slurm may call the job when its last start has ended in a state.

        Since 24.05 a job that was preempted with grace, and is kept from being started once more after its end, is
        PREEMPTED, whatever has become of it.
        """
        started_again = self.cluster.job_info(self.job)["Restarts"] != "0"
        preempted = any("preemption" in str(event.get("reason")) for event in self.events())
        return {state, "PREEMPTED"} if started_again and preempted and self.cluster.version >= (24, 5) else {state}

    def status(self, *, later: float = 0.0) -> dict[str, Any]:
        """What ``status --json`` says, or would say so many seconds later if nothing happened until then."""
        command = (sys.executable, "-c", AFTER_A_WHILE, str(later), "status", str(self.run), "--json")
        status: dict[str, Any] = json.loads(self.cluster.run(*command, timeout=180))
        return status

    def events(self) -> list[dict[str, Any]]:
        """The events of all writers in the order of time."""
        found = [event for path in sorted((self.run / "events").glob("*.jsonl")) for event in lines(path)]
        return sorted(found, key=lambda event: event["time"])

    def story(self) -> str:
        """What a person would look at when the run did not do as expected."""
        shown = self.cluster.call("scontrol", "show", "job", "-o", str(self.job))
        parts = [f"--- Slurm: {shown.stdout or shown.stderr}", "--- events"]
        parts += [json.dumps(event) for event in self.events()[-40:]]
        for output in sorted([*self.run.glob("*.out"), *self.run.glob("attempts/*/node-*.log")]):
            parts += [f"--- {output.relative_to(self.run)}", *output.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join(parts)


def write_job(folder: Path, *, braked: bool, **sections: dict[str, Any]) -> Path:
    """Write a job file of 2 nodes x 2 ranks; `sections` are merged over its own, such as ``slurm={"time": "2"}``."""
    brake = folder / "brake"
    if braked:
        brake.touch()
    job: dict[str, Any] = {
        "name": "digits",
        "runs_dir": str(folder / "runs"),
        "task": f"{HERE / 'paced_digits.py'}:PacedDigits",
        "params": {"brake": str(brake), "width": 8},
        "slurm": {"nodes": 2, "time": "00:20:00"},
        "launch": {"procs_per_node": 2},
        "train": {
            "epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "lr": 3e-3, "schedule": "cosine", "warmup_steps": 10,
            "drop_last": False, "ema_decay": 0.9, "seed": 7,
        },
        "checkpoint": {"every_steps": 10},
        "log": {"every_steps": 1, "sample_ids": True},
    }  # fmt: skip
    for name, settings in sections.items():
        job[name] = {**job.get(name, {}), **settings}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def submit(
    cluster: SlurmCluster, folder: Path, *options: str, braked: bool = True, **sections: dict[str, Any]
) -> TrainingJob:
    """Write the job file into `folder` and submit it with ``cluster-ddp submit``."""
    job_file = write_job(folder, braked=braked, **sections)
    return _submitted(cluster, job_file, options, folder / "brake")


def submit_script(
    cluster: SlurmCluster, folder: Path, script: str, argument: Path, *options: str, **sections: Any
) -> TrainingJob:
    """Submit a script of this folder, which is given the path of a file, on one node."""
    job = {
        "name": "own", "runs_dir": str(folder / "runs"), "script": str(HERE / script), "args": [str(argument)],
        **sections, "slurm": {"nodes": 1, "time": "00:20:00", **sections.get("slurm", {})},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return _submitted(cluster, path, options, argument)


def _submitted(cluster: SlurmCluster, job_file: Path, options: tuple[str, ...], brake: Path) -> TrainingJob:
    done = cluster.cli("submit", str(job_file), "--json", "--no-check", *options, cwd=job_file.parent)
    answer = json.loads(done.stdout.splitlines()[-1])
    return TrainingJob(cluster, int(answer["slurm_job_id"]), Path(answer["directory"]), brake)
