"""A sweep on a real Slurm: one array, whose elements are stopped, queued again and resumed each by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from training_job import write_job

pytestmark = pytest.mark.timeout(600)

PATIENCE = 240
GRID = "--grid=params.width=6,7,8"


def elements(cluster: SlurmCluster, folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.cli("status", folder, "--json", timeout=180).stdout)
    return found


@pytest.mark.usefixtures("light")
def test_each_element_is_queued_again_by_itself(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        braked=True,
        slurm={"nodes": 1, "cpus_per_task": 1},
        launch={"procs_per_node": 1},
        train={"epochs": 1},
    )

    def sweep() -> dict[str, Any]:
        said = cluster.cli("sweep", str(job), GRID, "--json", "--no-check", timeout=120)
        answer: dict[str, Any] = json.loads(said.stdout)
        return answer

    def story() -> str:
        outputs = [*Path(folder).glob("*.out"), *Path(folder).glob("*/*.out")]
        return "\n".join(f"--- {output}\n{output.read_text(errors='replace')}" for output in outputs)

    submitted = sweep()
    array, folder = submitted["slurm_job_id"], submitted["directory"]
    assert {line.split()[0] for line in cluster.run("squeue", "--noheader", "--array").splitlines()} == {
        f"{array}_{task}" for task in range(3)
    }
    # The last task of an array that Slurm starts has the array's own number as its job id.
    runs = [Path(folder) / f"000{task}-width={task + 6}" for task in range(3)]
    cluster.wait_for(lambda: all((run / "metrics.jsonl").exists() for run in runs), PATIENCE, f"all train\n{story()}")
    assert [(row["state"], row["slurm_job_id"]) for row in elements(cluster, folder)] == [
        ("RUNNING", f"{array}_{task}") for task in range(3)
    ]

    for task in (0, 2):
        cluster.run("scancel", "--signal=USR1", "--batch", f"{array}_{task}")

    def is_requeued(run: Path) -> bool:
        return any('"event": "requeued"' in events.read_text() for events in run.glob("events/*.jsonl"))

    # At full speed they may be complete before they have heard of it.
    cluster.wait_for(lambda: all(map(is_requeued, runs[::2])), PATIENCE, f"both are queued again\n{story()}")
    (tmp_path / "brake").unlink()

    def is_over() -> bool:
        return not cluster.queue() and all(row["state"] == "COMPLETED" for row in elements(cluster, folder))

    cluster.wait_for(is_over, PATIENCE, f"all are complete\n{story()}", every=1)
    assert [(row["attempts"], row["step"]) for row in elements(cluster, folder)] == [(2, 31), (1, 31), (2, 31)], story()
    assert sweep()["slurm_job_id"] is None
    assert cluster.queue() == []


@pytest.mark.chaos
def test_stopped_started_again_preempted_and_cancelled(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = write_job(
        tmp_path, braked=True, slurm={"nodes": 1, "cpus_per_task": 1}, launch={"procs_per_node": 1}, train={"epochs": 1}
    )
    command = ("sweep", str(job), GRID, "--at-once", "1", "--json")

    def sweep() -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(cluster.cli(*command, timeout=120).stdout)
        return answer

    def states() -> list[str]:
        return [row["state"] for row in elements(cluster, folder)]

    folder = sweep()["directory"]
    first = Path(folder) / "0000-width=6"
    cluster.wait_for((first / "metrics.jsonl").exists, PATIENCE, "the first trains")
    assert states() == ["RUNNING", "PENDING", "PENDING"]
    cluster.cli("stop", folder)
    cluster.wait_for(lambda: not cluster.queue(), PATIENCE, "nothing of it is left")
    assert states() == ["STOPPED", "LOST", "LOST"]

    cluster.wait_for(lambda: sweep()["slurm_job_id"], PATIENCE, "it goes on")
    attempt = first / "attempts" / "001" / "attempt.json"
    cluster.wait_for(attempt.exists, PATIENCE, "the first goes on")
    task = json.loads(attempt.read_text())["slurm_job_id"]
    cluster.wait_for(lambda: '"attempt": 1' in (first / "metrics.jsonl").read_text(), PATIENCE, "it trains again")
    cluster.preempt(int(cluster.run("squeue", "--noheader", f"--jobs={task}", "--format=%A")))
    cluster.wait_for((first / "attempts" / "002").exists, PATIENCE, "it was preempted and started again")

    cluster.cli("cancel", folder)
    cluster.wait_for(lambda: not cluster.queue(), PATIENCE, "nothing of it is left")
    assert states()[0] == "CANCELLED"
