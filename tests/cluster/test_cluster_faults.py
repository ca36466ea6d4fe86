"""One fault at a time, on a real Slurm: what goes on by itself, what is not tried again, and what stays ended.

Where a run goes on, it ends with the bits of a calm one. Small jobs: 2 nodes with one rank each, two epochs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from same_training import assert_same_training, checkpoints, repeated_steps
from slurm_cluster import CHECKOUT, SlurmCluster
from training_job import STEPS_PER_EPOCH, TrainingJob, write_job

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import NODE_LOST, EventWriter

pytestmark = pytest.mark.timeout(400)

STEPS = 2 * STEPS_PER_EPOCH
PATIENCE = 180
both_ways = pytest.mark.parametrize("via", ["sbatch", "submitit"])


def submit(
    cluster: SlurmCluster,
    folder: Path,
    *options: str,
    fault: dict[str, Any] | None = None,
    braked: bool = False,
    **sections: Any,
) -> TrainingJob:
    """Submit digits, with a fault of its own (parameters of `FaultyDigits`) or with the brake on."""
    small = {"train": {"epochs": 2}, "slurm": {"nodes": 2}, "launch": {"procs_per_node": 1}, "log": {"every_steps": 1}}
    merged = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {*small, *sections}}
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


@pytest.fixture(scope="module")
def calm(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """The run that nothing happens to."""
    training = submit(cluster, tmp_path_factory.mktemp("calm"))
    training.finish(timeout=PATIENCE)
    return training


def restarts(training: TrainingJob) -> int:
    return int(training.cluster.job_info(training.job)["Restarts"])


def finish(training: TrainingJob, calm: TrainingJob, *, attempts: int) -> None:
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


# -- what goes on by itself ------------------------------------------------------------------------------------------


@both_ways
def test_lost_node_is_requeued_elsewhere(cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, braked=True)
    training.wait_for_step(12, timeout=PATIENCE)
    (started,) = {e["host"] for e in training.events() if e["event"] == "node-started" and e["node"] == 1}
    cluster.crash_node(started)
    training.wait_for_restart(1)
    finish(training, calm, attempts=2)
    assert lost_nodes(training) == [(0, started)]
    said = [str(event.get("reason")) for event in training.events() if event["attempt"] == 0]
    assert not [reason for reason in said if "preemption" in reason], "a node failure is called that"
    second = {e["host"] for e in training.events() if e["event"] == "node-started" and e["attempt"] == 1}
    assert started not in second
    cluster.boot_node(started)


def lost_nodes(training: TrainingJob) -> list[tuple[int, str]]:
    return [(event["attempt"], event["host"]) for event in training.events() if event["event"] == "node-lost"]


@both_ways
def test_host_that_fails_again_is_excluded(cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, braked=True)
    for attempt in (0, 1):
        training.wait_for_step(12 + 5 * attempt, attempt=attempt, timeout=PATIENCE)
        cluster.kill(next(iter(cluster.ranks("node2").values())))
        training.wait_for_restart(attempt + 1)
    cluster.wait_for(lambda: cluster.job_info(training.job)["ExcNodeList"] == "node2", 20, "node2 is excluded")
    finish(training, calm, attempts=3)
    third = {e["host"] for e in training.events() if e["event"] == "node-started" and e["attempt"] == 2}
    assert third == {"node1", "node3"}


@both_ways
def test_batch_host_that_failed_twice_is_given_back(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str
) -> None:
    """When the batch host dies, nobody can exclude it before Slurm starts the job again. (It only seems to die.)"""
    training = submit(cluster, tmp_path, "--via", via, braked=True, slurm={"extra": {"hold": True}})
    run = RunDirectory(training.run)
    end_attempt(begin_attempt(run, slurm_job_id="1000000", host="elsewhere", pid=0, nodes=2, procs=1))
    cluster.run("scontrol", "release", str(training.job))
    training.wait_for_step(12, attempt=1, timeout=PATIENCE)
    host = cluster.job_info(training.job)["BatchHost"]
    cluster.run("scontrol", "requeue", str(training.job))
    cluster.wait_for(lambda: cluster.state(training.job) == "PENDING", 60, "the script has ended")
    for attempt in (0, 1):
        EventWriter(run, "test").write(NODE_LOST, attempt=attempt, host=host, node=0)
    assert cluster.job_info(training.job)["ExcNodeList"] == "(null)"
    training.wait_for_restart(2)
    cluster.wait_for(lambda: cluster.job_info(training.job)["ExcNodeList"] == host, 20, f"{host} is excluded")
    finish(training, calm, attempts=3)
    third = {e["host"] for e in training.events() if e["event"] == "node-started" and e["attempt"] == 2}
    assert third == set(cluster.nodes) - {host}
    assert restarts(training) == 2


def test_killed_rank_is_restarted_inside_the_allocation(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path
) -> None:
    fault = {"fault": "kill", "at": 30, "marker": str(tmp_path / "struck")}
    training = submit(cluster, tmp_path, fault=fault, launch={"max_restarts": 1})
    finish(training, calm, attempts=1)
    assert restarts(training) == 0
    resumed = [event["step"] for event in training.events() if event["event"] == "resumed"]
    assert resumed and resumed[0] in (10, 20)
    failed = [(event["rank"], event["signal"]) for event in training.events() if event["event"] == "rank-failed"]
    assert (1, "SIGKILL") in failed


def test_hang_is_noticed_explained_and_retried(cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path) -> None:
    fault = {"fault": "hang", "at": 30, "marker": str(tmp_path / "struck")}
    training = submit(cluster, tmp_path, fault=fault, launch={"hang_timeout": 10})
    finish(training, calm, attempts=2)
    stacks = {rank: (training.run / f"attempts/000/stacks-rank{rank}.txt").read_text() for rank in (0, 1)}
    assert "_fail" in stacks[1], "the stack of the rank that sleeps shows where"
    assert "_fail" not in stacks[0]
    hangs = [event for event in training.events() if event["event"] == "hang"]
    assert hangs
    assert all(event["step"] == 27 and event["phase"] == "training" for event in hangs)
    requeued = [event["reason"] for event in training.events() if event["event"] == "requeued"]
    assert len(requeued) == 1 and "hangs" in requeued[0]


@both_ways
def test_stop_is_final_until_a_person_resumes(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str
) -> None:
    training = submit(cluster, tmp_path, "--via", via, braked=True)
    training.wait_for_step(12, timeout=PATIENCE)
    cluster.cli("stop", str(training.run), timeout=PATIENCE)
    status = end(training, "COMPLETED")
    assert status["state"] == "STOPPED", training.story()
    assert status["last_checkpoint"] == status["step"] >= 12
    assert restarts(training) == 0
    elsewhere = ("--set", "slurm.partition=urgent")
    answer = json.loads(cluster.cli("resume", str(training.run), "--json", *elsewhere).stdout.splitlines()[-1])
    assert answer["run_id"] == training.run.name
    again = replace(training, job=int(answer["slurm_job_id"]))
    assert cluster.job_info(again.job)["Partition"] == "urgent"
    finish(again, calm, attempts=2)
    assert repeated_steps(training.run) == []


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
    ("moment", "every"),
    [
        (_pending, 10),
        (_starting, 10),
        (_training, 1),  # a checkpoint after each step: it is always saving
        (_after_a_signal("TERM"), 10),
        (_after_a_signal("USR1"), 10),
        (_requeued, 10),
    ],
    ids=["pending", "starting", "saving", "after TERM", "after USR1", "requeued"],
)
def test_scancel_is_final_at_any_moment(
    cluster: SlurmCluster, tmp_path: Path, moment: Callable[[SlurmCluster, TrainingJob], None], every: int
) -> None:
    blocker = cluster.sbatch("sleep 600", nodes=3, options=("--exclusive",)) if moment is _pending else None
    training = submit(cluster, tmp_path, braked=True, checkpoint={"every_steps": every})
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


# -- what is not tried again -----------------------------------------------------------------------------------------


@both_ways
def test_failure_at_the_start_is_not_tried_again(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(cluster, tmp_path, "--via", via, fault={"fault": "import"})
    status = end(training, "FAILED")
    assert (status["state"], status["attempts"], restarts(training)) == ("FAILED", 1, 0), training.story()
    assert "a_package_that_nobody_has" in status["reason"]


@pytest.mark.chaos
@both_ways
def test_what_is_to_come_after_a_run_that_failed_comes(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str
) -> None:
    (tmp_path / "first").mkdir()
    first = submit(cluster, tmp_path / "first", "--via", via, fault={"fault": "import"})
    second = submit(cluster, tmp_path, "--via", "sbatch", "--after", str(first.run))  # submitit has no --after
    finish(second, calm, attempts=1)
    assert first.status()["state"] == "FAILED"


@both_ways
def test_run_without_progress_stalls_and_says_why(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    training = submit(
        cluster, tmp_path, "--via", via, fault={"fault": "crash", "at": 8}, requeue={"max_without_progress": 2},
        checkpoint={"every_steps": 1000},
    )  # fmt: skip
    status = end(training, "FAILED")
    assert (status["state"], status["attempts"], restarts(training)) == ("STALLED", 2, 1), training.story()
    host = {event["host"] for event in training.events() if event["event"] == "failed" and event["rank"] == 1}.pop()
    assert f"rank 1 on {host}" in status["reason"]
    assert "the fault of the test" in status["reason"]


# -- a script of its own -----------------------------------------------------------------------------------------------


def test_script_without_a_run_makes_one_and_resumes_into_it(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path
) -> None:
    """``sbatch sbatch/quickstart.sbatch`` with a person's edits: no run directory is given."""
    small = {"train": {"epochs": 2}, "slurm": {"nodes": 2}, "launch": {"procs_per_node": 1}, "log": {"every_steps": 1}}
    job = write_job(tmp_path, braked=True, **small)
    script = (CHECKOUT / "sbatch" / "quickstart.sbatch").read_text()
    script = script.replace("python=(python3)", f"python=({sys.executable})").replace("(quickstart)", f"({job})")
    (tmp_path / "mine.sbatch").write_text(script)
    number = int(cluster.run("sbatch", "--parsable", "mine.sbatch", cwd=tmp_path))
    run = cluster.wait_for(lambda: next(iter((tmp_path / "runs").glob("*/run.json")), None), PATIENCE, "it makes a run")
    training = TrainingJob(cluster, number, run.parent, tmp_path / "brake")
    training.wait_for_step(12, timeout=PATIENCE)
    cluster.preempt(training.job)
    training.wait_for_restart(1)
    finish(training, calm, attempts=2)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [training.run.name]
    assert (training.run / "job.sbatch").read_text() == script
