"""What ends a run on a real Slurm until a person resumes it: a stop, a cancel, a failure that would come again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from same_training import checkpoints
from slurm_cluster import SlurmCluster
from small_job import ONE_RANK, PATIENCE, CalmRun, both_ways, both_ways_at_length, end, finish, restarts, submit
from training_job import TrainingJob

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.stopfile import PERSON, request_stop

pytestmark = pytest.mark.timeout(400)


@both_ways_at_length
@pytest.mark.usefixtures("light")
def test_a_stop_while_slurm_queues_the_run_again_takes_it_out_of_the_queue(
    cluster: SlurmCluster, tmp_path: Path, via: str
) -> None:
    training = submit(cluster, tmp_path, "--via", via, braked=True, **ONE_RANK)
    training.wait_for_step(12, timeout=PATIENCE)
    cluster.run("scontrol", "requeue", str(training.job))
    request_stop(RunDirectory(training.run).attempt(0), reason=PERSON, by="me")
    cluster.wait_for(lambda: cluster.queue() == [], 60, f"nothing is queued\n{training.story()}")
    status = training.status()
    assert (status["state"], status["reason"], status["attempts"]) == ("STOPPED", "stopped by me", 1), training.story()
    assert cluster.state(training.job) == "CANCELLED", "it was started once more, to no end"
    assert status["last_checkpoint"] == status["step"] >= 12


# -- what stays cancelled --------------------------------------------------------------------------------------------


def _pending(cluster: SlurmCluster, training: TrainingJob) -> None:
    assert cluster.state(training.job) == "PENDING"


def _starting(cluster: SlurmCluster, training: TrainingJob) -> None:
    cluster.wait_for(lambda: any(map(cluster.agents, cluster.nodes)), 60, "an agent runs", every=0.05)


def _training(cluster: SlurmCluster, training: TrainingJob) -> None:
    training.wait_for_step(5, timeout=PATIENCE)


def _after_a_signal(name: str) -> Callable[[SlurmCluster, TrainingJob], None]:
    def moment(cluster: SlurmCluster, training: TrainingJob) -> None:
        _training(cluster, training)
        cluster.send_signal(training.job, name)

    return moment


def _requeued(cluster: SlurmCluster, training: TrainingJob) -> None:
    _after_a_signal("USR1")(cluster, training)
    training.wait_for_restart(1)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(_pending, id="pending"),
        pytest.param(_starting, id="starting"),
        pytest.param(_after_a_signal("TERM"), id="after TERM", marks=pytest.mark.chaos),
        pytest.param(_after_a_signal("USR1"), id="after USR1"),
        pytest.param(_requeued, id="requeued"),
    ],
)
def test_scancel_is_final_at_any_moment(
    cluster: SlurmCluster,
    tmp_path: Path,
    moment: Callable[[SlurmCluster, TrainingJob], None],
    request: pytest.FixtureRequest,
) -> None:
    if moment is not _starting:
        request.getfixturevalue("light")
    blocker = cluster.sbatch("sleep 600", nodes=3, options=("--exclusive",)) if moment is _pending else None
    training = submit(cluster, tmp_path, braked=True, slurm={"nodes": 1})
    moment(cluster, training)
    cluster.cancel(training.job)
    if blocker:
        cluster.cancel(blocker)
    # The queue holds a job until its script has ended; one that was requeued would stay in it.
    cluster.wait_for(lambda: cluster.queue() == [], 60, f"nothing is queued\n{training.story()}")
    assert training.status()["state"] == "CANCELLED", training.story()
    assert cluster.state(training.job) == "CANCELLED"
    assert restarts(training) == (1 if moment is _requeued else 0)
    if moment not in (_pending, _starting):
        assert checkpoints(training.run)


@pytest.mark.chaos  # at each moment, without the resume: above
def test_cancelled_run_stays_cancelled_until_a_person_resumes_it(
    cluster: SlurmCluster, calm_alone: CalmRun, tmp_path: Path
) -> None:
    always_saving = {"every_steps": 1}
    training = submit(cluster, tmp_path, braked=True, checkpoint=always_saving, **ONE_RANK)
    _training(cluster, training)
    cluster.cancel(training.job)
    info = cluster.wait_for_state(training.job, "CANCELLED", timeout=30)
    time.sleep(8)  # longer than Slurm holds a requeued job back
    assert cluster.state(training.job) == "CANCELLED"
    assert info["Restarts"] == "0"
    assert cluster.queue() == []
    assert training.status()["state"] == "CANCELLED", training.story()
    assert checkpoints(training.run), "a cancelled run has time to save, too"
    seldom = ("--set", "checkpoint.every_steps=10")
    answer = json.loads(cluster.cli("resume", str(training.run), "--json", *seldom).stdout.splitlines()[-1])
    finish(replace(training, job=int(answer["slurm_job_id"])), calm_alone, attempts=2)


# -- what is not tried again -----------------------------------------------------------------------------------------


@both_ways
def test_failure_at_the_start_is_not_tried_again(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, fault={"fault": "import"}, slurm={"nodes": 1})
    status = end(training, "FAILED")
    assert (status["state"], status["attempts"], restarts(training)) == ("FAILED", 1, 0), training.story()
    assert "a_package_that_nobody_has" in status["reason"]


@pytest.mark.chaos
@both_ways_at_length
def test_run_without_progress_stalls_and_says_why(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(
        cluster, tmp_path, "--via", via, fault={"fault": "crash", "at": 8}, requeue={"max_without_progress": 2},
        checkpoint={"every_steps": 1000}, slurm={"nodes": 1}, launch={"procs_per_node": 2},
    )  # fmt: skip
    status = end(training, "FAILED")
    assert (status["state"], status["attempts"], restarts(training)) == ("STALLED", 2, 1), training.story()
    host = {event["host"] for event in training.events() if event["event"] == "failed" and event["rank"] == 1}.pop()
    assert f"rank 1 on {host}" in status["reason"]
    assert "the fault of the test" in status["reason"]
