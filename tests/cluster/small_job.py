"""Small jobs on the real Slurm: digits on 2 nodes with one rank each; calm, braked, or with a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from same_training import assert_same_training
from slurm_cluster import SlurmCluster
from training_job import PATIENCE, STEPS, TrainingJob, write_job

SMALL: dict[str, dict[str, Any]] = {
    "slurm": {"nodes": 2}, "launch": {"procs_per_node": 1}, "log": {"every_steps": 1},
}  # fmt: skip
ONE_RANK: dict[str, dict[str, Any]] = {"slurm": {"nodes": 1}, "launch": {"procs_per_node": 1}}
both_ways = pytest.mark.parametrize("via", ["sbatch", "submitit"])
# Both ways have one keeper: where a test takes minutes, the second one is for `make chaos`.
both_ways_at_length = pytest.mark.parametrize("via", ["sbatch", pytest.param("submitit", marks=pytest.mark.chaos)])


class CalmRun(NamedTuple):
    """A run that nothing happened to, whose results others are to have, too."""

    run: Path


def submit(
    cluster: SlurmCluster,
    folder: Path,
    *options: str,
    fault: dict[str, Any] | None = None,
    braked: bool = False,
    **sections: Any,
) -> TrainingJob:
    """Submit digits, with a fault of its own (parameters of `FaultyDigits`) or with the brake on."""
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    path = write_job(folder, braked=braked, **merged)
    if fault is not None:
        job = yaml.safe_load(path.read_text())
        job["task"] = f"{Path(__file__).with_name('faulty_digits.py')}:FaultyDigits"
        job["params"] = {"width": 8, **fault}
        path.write_text(yaml.safe_dump(job))
    answer = json.loads(
        cluster.cli("submit", str(path), "--json", "--no-check", *options, cwd=folder).stdout.splitlines()[-1]
    )
    return TrainingJob(cluster, int(answer["slurm_job_id"]), Path(answer["directory"]), folder / "brake")


def restarts(training: TrainingJob) -> int:
    return int(training.cluster.job_info(training.job)["Restarts"])


def finish(training: TrainingJob, calm: CalmRun, *, attempts: int) -> None:
    """Let the run complete; it took so many attempts, and ended like the calm one."""
    if training.brake.exists():
        training.full_speed()
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", attempts, STEPS), training.story()
    assert_same_training(training.run, calm.run)


def end(training: TrainingJob, *states: str) -> dict[str, Any]:
    """Wait until Slurm has ended the job in one of the states; what `status` says of the run then."""
    training.cluster.wait_for_state(training.job, *states, timeout=PATIENCE)
    return training.status()
