"""Preemptions: however often Slurm takes the nodes away, the job ends once, and stays ended.

A preemption with grace leaves a mark on the job, by which Slurm 24.05 and 26.05 start it once more after it has ended:
the nodes would be given for nothing, and whoever waits for its end would wait. Kept from that, they call it PREEMPTED.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import training_job
from same_training import assert_same_training, repeated_steps
from slurm_cluster import SlurmCluster
from small_job import ONE_RANK, CalmRun, submit
from training_job import HERE, PATIENCE, STEPS, TrainingJob, submit_script

from cluster_ddp.run.attempt_record import read_attempt
from cluster_ddp.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(900)

TIMES = 10
KINDS = {  # the partition, and its grace in seconds
    "grace": ("debug", 10),
    "no grace": ("debug", 0),
    "user signal": ("debug", 10),
    "cancelled with grace": ("cancel", 10),
    "cancelled without": ("cancel", 0),
}
ENDS = {"COMPLETED": "COMPLETED", "STOPPED": "COMPLETED", "FAILED": "FAILED"}  # of the run, and of its job
WAYS = ["sbatch", "submitit"]
both_ways = pytest.mark.parametrize("via", WAYS)
sbatch_first = pytest.mark.parametrize("via", ["sbatch", pytest.param("submitit", marks=pytest.mark.chaos)])


def preempt(training: TrainingJob, number: int) -> None:
    """Take the nodes away while training is under way, and wait until it is under way again."""
    training.wait_for_step(3 * number, attempt=number - 1, timeout=PATIENCE)
    training.cluster.preempt(training.job)
    training.wait_for_restart(number, timeout=PATIENCE)
    training.wait_for_step(3 * number + 1, attempt=number, timeout=PATIENCE)


@contextmanager
def preemption(cluster: SlurmCluster, kind: str) -> Iterator[str]:
    """Set the cluster for preemption of one kind; the partition to submit to."""
    partition, grace = KINDS[kind]
    lines = []
    if kind == "user signal":
        newer = cluster.version >= (24, 5)
        lines = ["PreemptParameters=send_user_signal" if newer else "SlurmctldParameters=preempt_send_user_signal"]
    elif not grace:  # Slurm's own default: the 5 s of the cluster are too few for a keeper on a busy machine
        lines = ["KillWait=30"]
    with cluster.configured(*lines):
        # Until the configuration is read again, at the end.
        cluster.run("scontrol", "update", f"PartitionName={partition}", f"GraceTime={grace}")
        yield partition


@pytest.mark.newest
@pytest.mark.usefixtures("light")
def test_submitit_job_is_completed_once(cluster: SlurmCluster, calm_alone: CalmRun, tmp_path: Path) -> None:
    """So is one of sbatch: test_cluster_end_to_end.py."""
    training = submit(cluster, tmp_path, "--via", "submitit", braked=True, **ONE_RANK)
    preempt(training, 1)
    training.full_speed()
    training.stays_ended("COMPLETED", restarts=1)
    status = training.status()
    assert (status["state"], status["attempts"]) == ("COMPLETED", 2)
    assert_same_training(training.run, calm_alone.run)
    assert repeated_steps(training.run) == [], "work was lost although there was time to save"


@sbatch_first
@pytest.mark.usefixtures("light")
def test_preempted_while_setup_lines_run(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    """Its SIGTERM ends them as well; on this partition nobody queues the job again but the job itself."""
    mark = tmp_path / "setup"
    training = submit(
        cluster, tmp_path, "--via", via, slurm={**ONE_RANK["slurm"], "partition": "cancel"},
        launch={"setup": [f"touch {mark}; ((${{SLURM_RESTART_COUNT:-0}})) || sleep 100"]},
    )  # fmt: skip
    cluster.wait_for(mark.exists, PATIENCE, f"the setup lines run\n{training.story()}")
    cluster.preempt(training.job)
    training.wait_for_restart(1)
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"]) == ("COMPLETED", 1), training.story()


@pytest.mark.chaos
@both_ways
@pytest.mark.parametrize(("kind", "times"), [(kind, TIMES if kind == "grace" else 1) for kind in KINDS])
def test_completed_once_however_often_it_was_preempted(
    cluster: SlurmCluster, tmp_path: Path, via: str, kind: str, times: int
) -> None:
    with preemption(cluster, kind) as partition:
        nodes = 2 if times == 1 else 1
        small = {"slurm": {"partition": partition, "nodes": nodes}, "launch": {"procs_per_node": 1}}
        training = training_job.submit(cluster, tmp_path, "--via", via, **small)
        for number in range(1, times + 1):
            preempt(training, number)
        training.full_speed()
        training.stays_ended("COMPLETED", restarts=times)
    status = training.status()
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", times + 1, STEPS)
    if KINDS[kind][1]:
        assert repeated_steps(training.run) == [], "work was lost although there was time to save"


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_preemptions_and_one_end(cluster: SlurmCluster, tmp_path: Path, kind: str) -> None:
    """Six small scripts at once: submitted both ways, to come to each end."""
    with preemption(cluster, kind) as partition:
        jobs = {(via, end): submit_light(cluster, tmp_path, via, end, partition) for via in WAYS for end in ENDS}
        for number in range(1, TIMES + 1):
            wait_until_under_way(jobs.values(), number - 1)
            urgent = cluster.sbatch("true", nodes=len(cluster.nodes), options=("--partition=urgent", "--exclusive"))
            cluster.wait_for_state(urgent, "COMPLETED", timeout=PATIENCE)
        wait_until_under_way(jobs.values(), TIMES)
        restarts = {key: int(cluster.job_info(job.job)["Restarts"]) for key, job in jobs.items()}
        for (_, end), job in jobs.items():
            bring_to(job, end)
        for key, job in jobs.items():
            job.stays_ended(ENDS[key[1]], restarts=restarts[key])
        for key, job in jobs.items():
            status = job.status()
            # Of two preemptions in a row the second may come before an attempt has begun.
            assert status["state"] == key[1] and TIMES < status["attempts"] <= restarts[key] + 1, job.story()


def submit_light(cluster: SlurmCluster, folder: Path, via: str, end: str, partition: str) -> TrainingJob:
    """Submit a script that starts without torch, and runs until a file says how it ends."""
    own = folder / f"{via}-{end}"
    own.mkdir()
    setup = [f"export PYTHONPATH={HERE / 'light'}${{PYTHONPATH:+:$PYTHONPATH}}"]
    sections = {"slurm": {"partition": partition}, "launch": {"setup": setup}}
    return submit_script(cluster, own, "counting_script.py", own / "end", "--via", via, **sections)


def wait_until_under_way(jobs: Iterable[TrainingJob], restarts: int) -> None:
    """Wait until each of the jobs has been started again so often, and its script counts."""

    def is_under_way(job: TrainingJob) -> bool:
        info = job.cluster.job_info(job.job)
        begun = max((int(folder.name) for folder in job.run.glob("attempts/[0-9]*")), default=None)
        if begun is None or info["JobState"] != "RUNNING" or int(info["Restarts"]) < restarts:
            return False
        attempt = RunDirectory(job.run).attempt(begun)
        said = "".join(log.read_text() for log in attempt.path.glob("node-*.log"))
        return read_attempt(attempt).restart_count == int(info["Restarts"]) and "goes on from" in said

    for job in jobs:
        job.cluster.wait_for(lambda job=job: is_under_way(job), PATIENCE, f"restart {restarts}\n{job.story()}", every=1)


def bring_to(job: TrainingJob, end: str) -> None:
    """Let a light job come to its end."""
    if end == "STOPPED":
        job.cluster.cli("stop", str(job.run), timeout=PATIENCE)
        return
    said = job.brake.with_name("said")
    said.write_text("" if end == "COMPLETED" else "Error: as the test wants it")
    said.rename(job.brake)


@pytest.mark.chaos
@both_ways
def test_stopped_after_a_preemption(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, braked=True, **ONE_RANK)
    preempt(training, 1)
    cluster.cli("stop", str(training.run), timeout=PATIENCE)
    training.stays_ended("COMPLETED", restarts=1)
    assert training.status()["state"] == "STOPPED"


@pytest.mark.chaos
@both_ways
def test_failed_after_a_preemption(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, braked=True, requeue={"max_requeues": 1}, **ONE_RANK)
    preempt(training, 1)
    host = cluster.job_info(training.job)["BatchHost"]
    cluster.kill(next(iter(cluster.ranks(host).values())))
    training.stays_ended("FAILED", restarts=1)
    assert training.status()["state"] == "STALLED"


@sbatch_first
@pytest.mark.usefixtures("light")
def test_cancelled_within_the_grace(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    slow = {"brake": str(tmp_path / "brake"), "width": 8, "seconds": 5}  # no step ends while it is cancelled
    training = submit(cluster, tmp_path, "--via", via, braked=True, params=slow, **ONE_RANK)
    training.wait_for_step(1, timeout=PATIENCE)
    cluster.preempt(training.job)

    def in_grace() -> bool:
        return cluster.job_info(training.job).get("PreemptTime", "None") != "None"

    cluster.wait_for(in_grace, PATIENCE, "it is preempted", every=0.05)
    time.sleep(2.5)  # Slurm's clock has whole seconds
    cluster.cancel(training.job)
    training.stays_ended("CANCELLED", restarts=0)
    assert training.status()["state"] == "CANCELLED", training.story()
