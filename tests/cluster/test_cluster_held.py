"""Jobs that Slurm holds: `status` tells so the first time that it is asked, with the command that releases them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from small_job import PATIENCE, both_ways, both_ways_at_length, submit
from training_job import TrainingJob

pytestmark = pytest.mark.timeout(400)

NOTHING_TRAINS: dict[str, Any] = {"setup": ["sleep 300"]}


def held(training: TrainingJob) -> str:
    """Wait until Slurm holds the job; what `status`, asked once, says of it then."""
    cluster = training.cluster

    def is_held() -> bool:
        info = cluster.job_info(training.job)
        return info["Priority"] == "0" and info["JobState"] not in ("RUNNING", "COMPLETING")

    cluster.wait_for(is_held, PATIENCE, "Slurm holds the job")
    status = training.status()
    assert status["state"] == "HELD", training.story()
    assert f"scontrol release {training.job}" in status["reason"]
    return str(status["reason"])


def release(training: TrainingJob) -> None:
    training.cluster.run("scontrol", "release", str(training.job))
    training.cluster.wait_for_state(training.job, "RUNNING", timeout=PATIENCE)


@both_ways_at_length
def test_held_by_a_person(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, launch=NOTHING_TRAINS, slurm={"extra": {"hold": True}})
    job = str(training.job)
    assert "(JobHeldUser)" in held(training)
    release(training)
    cluster.run("scontrol", "requeuehold", job)
    assert "(job requeued in held state)" in held(training)
    release(training)
    cluster.run("scontrol", "requeuehold", "State=SpecialExit", job)
    assert "(job requeued in held state)" in held(training)
    release(training)
    cluster.run("scontrol", "requeue", job)
    cluster.wait_for_state(training.job, "PENDING", timeout=PATIENCE)
    cluster.run("scontrol", "hold", job)
    assert "an administrator holds" in held(training)


@both_ways
def test_held_after_a_prolog_that_failed(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    with cluster.configured("Prolog=/bin/false"):
        training = submit(cluster, tmp_path, "--via", via, launch=NOTHING_TRAINS)
        assert "(launch failed requeued held)" in held(training)


@both_ways
def test_held_after_starts_that_a_node_refused(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    """MaxBatchRequeue, which Slurm has since 24.05; before, it holds such a job at once."""
    limit = ["MaxBatchRequeue=1"] if cluster.version >= (24, 5) else []
    with cluster.configured(*limit):
        training = submit(cluster, tmp_path, "--via", via, launch=NOTHING_TRAINS, slurm={"extra": {"hold": True}})
        folders = [cluster.folder / f"spool-{node}" / f"job{training.job:05}" for node in cluster.nodes]
        for folder in folders:
            folder.write_text("a file where slurmd makes the job's folder")
        try:
            cluster.run("scontrol", "release", str(training.job))
            cluster.wait_for(lambda: cluster.job_info(training.job)["Restarts"] != "0", PATIENCE, "it is queued again")
            assert ("(launch failure limit exceeded" if limit else "(launch failed") in held(training)
        finally:
            for folder in folders:
                folder.unlink()
