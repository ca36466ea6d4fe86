"""The promise, on a real Slurm: whatever stops the digits, they come back by themselves and end with the same bits.

One calm run of two ranks on each of two nodes is the reference; it has light agents, what is preempted has torchrun.
What needs fewer ranks is in the other files, with one calm run of theirs (`calm` in conftest.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from light_agent import LIGHT_AGENT
from same_training import assert_every_sample_once, assert_same_training, repeated_steps
from slurm_cluster import SlurmCluster
from training_job import SAMPLES, STEPS, STEPS_PER_EPOCH, TrainingJob, submit

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def calm(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """The run that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)
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
    training.stays_ended("COMPLETED", restarts=1)
    assert_completed_as(training, calm, attempts=2)
    assert repeated_steps(training.run) == [], "work was lost although there was time to save"
