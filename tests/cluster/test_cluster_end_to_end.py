"""The promise, on a real Slurm: whatever stops the digits, they come back by themselves and end with the same bits.

One calm run is the reference. Each other run is braked until its fault has happened, then goes on at full speed.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from same_training import assert_every_sample_once, assert_same_training, checkpoints, repeated_steps
from slurm_cluster import SlurmCluster
from training_job import SAMPLES, STEPS, STEPS_PER_EPOCH, TrainingJob, submit

from cluster_ddp.run.ending import root_failure

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def calm(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """The run that nothing happens to."""
    training = submit(cluster, tmp_path_factory.mktemp("calm"), braked=False)
    training.finish()
    return training


def assert_completed_as(training: TrainingJob, calm: TrainingJob, *, attempts: int) -> None:
    """The run is complete after so many attempts, and nobody could tell it from the calm one by its results."""
    status = training.status()
    assert status["state"] == "COMPLETED", training.story()
    assert status["attempts"] == attempts
    assert status["step"] == status["total_steps"] == status["last_checkpoint"] == STEPS
    assert status["slurm_job_id"] == str(training.job)
    assert_same_training(training.run, calm.run)
    assert_every_sample_once(training.run, SAMPLES, STEPS_PER_EPOCH)


def test_submitted_run_completes(calm: TrainingJob) -> None:
    status = calm.status()
    assert_completed_as(calm, calm, attempts=1)
    assert status["metrics"]["val/accuracy"] > 0.5
    assert calm.cluster.job_info(calm.job)["Restarts"] == "0"
    hosts = {event["host"] for event in calm.events() if event["event"] == "node-started"}
    assert len(hosts) == 2


@pytest.mark.parametrize("kind", ["cluster", pytest.param("pgid_cluster", marks=pytest.mark.chaos)])
def test_preempted_run_comes_back_where_it_was(
    kind: str, calm: TrainingJob, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cluster: SlurmCluster = request.getfixturevalue(kind)
    training = submit(cluster, tmp_path)
    training.wait_for_step(12)
    cluster.preempt(training.job)
    training.wait_for_restart(1)
    training.full_speed()
    training.finish()
    assert_completed_as(training, calm, attempts=2)
    assert repeated_steps(training.run) == [], "work was lost although there was time to save"


def test_run_stopped_by_its_time_limit_twice(cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path) -> None:
    # Slurm looks at time limits every 30 s and warns up to 30 s early: here 25 to 55 s after the start of an attempt,
    # when it trains on a busy machine, too. Two such attempts on an idle one do not reach the end.
    slow = {"seconds": 1.0}
    training = submit(cluster, tmp_path, slurm={"time": "00:01:00"}, requeue={"warning": "5s"}, params=slow)
    training.wait_for_restart(1)
    training.wait_for_restart(2)
    cluster.run("scontrol", "update", f"JobId={training.job}", "TimeLimit=20")
    training.full_speed()
    training.finish()
    assert_completed_as(training, calm, attempts=3)
    assert repeated_steps(training.run) == []
    reasons = [event["reason"] for event in training.events() if event["event"] == "stopped"]
    assert reasons == ["time-limit", "time-limit"]


def test_submitit_run_is_preempted_and_comes_back(cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path) -> None:
    training = submit(cluster, tmp_path, "--via", "submitit")
    training.wait_for_step(12)
    cluster.preempt(training.job)
    training.wait_for_restart(1)
    training.full_speed()
    training.finish()
    assert_completed_as(training, calm, attempts=2)


def test_cancelled_run_stays_cancelled_until_a_person_resumes_it(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path
) -> None:
    training = submit(cluster, tmp_path)
    training.wait_for_step(5)
    cluster.cancel(training.job)
    info = cluster.wait_for_state(training.job, "CANCELLED", timeout=30)
    time.sleep(8)  # longer than Slurm holds a requeued job back
    assert cluster.state(training.job) == "CANCELLED"
    assert info["Restarts"] == "0"
    assert cluster.queue() == []
    assert training.status()["state"] == "CANCELLED"
    assert checkpoints(training.run), "a cancelled run has time to save, too"
    training.full_speed()
    answer = json.loads(cluster.cli("resume", str(training.run), "--json").stdout.splitlines()[-1])
    again = replace(training, job=int(answer["slurm_job_id"]))
    again.finish()
    assert_completed_as(again, calm, attempts=2)


def test_killed_rank_costs_no_more_than_since_the_last_checkpoint(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path
) -> None:
    training = submit(cluster, tmp_path)
    training.wait_for_step(14)
    saved = max(int(path.name.removeprefix("step-")) for path in checkpoints(training.run))
    rank = next(iter(cluster.ranks("node2").values()))
    cluster.kill(rank)
    training.wait_for_restart(1)
    training.full_speed()
    training.finish()
    assert_completed_as(training, calm, attempts=2)
    lost = repeated_steps(training.run)
    assert all(step > saved for step in lost)
    failed = [event for event in training.events() if event["event"] == "rank-failed"]
    assert failed
    # Its peer on the other node may notice first that it is gone; what counts is whom the run blames in the end.
    assert root_failure(failed)["host"] == "node2"
