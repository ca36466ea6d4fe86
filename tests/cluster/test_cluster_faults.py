"""One fault at a time, on a real Slurm: what goes on by itself, and ends with the bits of a calm run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from same_training import repeated_steps
from slurm_cluster import CHECKOUT, SlurmCluster
from small_job import ONE_RANK, PATIENCE, SMALL, CalmRun, finish, restarts, submit
from training_job import TrainingJob, write_job

pytestmark = pytest.mark.timeout(400)


@pytest.mark.chaos  # without Slurm: test_launch_node.py
def test_killed_rank_is_restarted_inside_the_allocation(cluster: SlurmCluster, calm: CalmRun, tmp_path: Path) -> None:
    fault = {"fault": "kill", "at": 30, "marker": str(tmp_path / "struck")}
    training = submit(cluster, tmp_path, fault=fault, launch={"max_restarts": 1})
    finish(training, calm, attempts=1)
    assert restarts(training) == 0
    resumed = [event["step"] for event in training.events() if event["event"] == "resumed"]
    assert resumed and resumed[0] in (10, 20)
    failed = [(event["rank"], event["signal"]) for event in training.events() if event["event"] == "rank-failed"]
    assert (1, "SIGKILL") in failed


def test_hang_is_noticed_explained_and_retried(cluster: SlurmCluster, calm: CalmRun, tmp_path: Path) -> None:
    fault = {"fault": "hang", "at": 30, "marker": str(tmp_path / "struck")}
    training = submit(cluster, tmp_path, fault=fault, launch={"hang_timeout": 10})
    finish(training, calm, attempts=2)
    stacks = {rank: (training.run / f"attempts/000/stacks-rank{rank}.txt").read_text() for rank in (0, 1)}
    assert "_fail" in stacks[1], "the stack of the rank that sleeps shows where"
    assert "_fail" not in stacks[0]
    hangs = [event for event in training.events() if event["event"] == "hang"]
    assert hangs
    assert all(event["step"] == 29 and event["phase"] == "training" for event in hangs)
    requeued = [event["reason"] for event in training.events() if event["event"] == "requeued"]
    assert len(requeued) == 1 and "hangs" in requeued[0]


@pytest.mark.newest
@pytest.mark.usefixtures("light")
def test_run_stopped_by_its_time_limit_twice(cluster: SlurmCluster, calm_alone: CalmRun, tmp_path: Path) -> None:
    # Slurm looks at time limits every 30 s and warns up to 30 s early: here 25 to 55 s after the start of an attempt,
    # when it trains on a busy machine, too. Two such attempts on an idle one do not reach the end.
    slow = {"seconds": 2.0}
    slurm, launch = {**ONE_RANK["slurm"], "time": "00:01:00"}, ONE_RANK["launch"]
    training = submit(
        cluster, tmp_path, braked=True, slurm=slurm, launch=launch, requeue={"warning": "5s"}, params=slow
    )
    training.wait_for_restart(1)
    training.wait_for_restart(2)
    cluster.run("scontrol", "update", f"JobId={training.job}", "TimeLimit=20")
    finish(training, calm_alone, attempts=3)
    assert repeated_steps(training.run) == []
    reasons = [event["reason"] for event in training.events() if event["event"] == "stopped"]
    assert reasons == ["time-limit", "time-limit"]


@pytest.mark.usefixtures("light")
def test_script_without_a_run_makes_one_and_resumes_into_it(
    cluster: SlurmCluster, calm: CalmRun, tmp_path: Path
) -> None:
    """``sbatch sbatch/quickstart.sbatch`` with a person's edits: no run directory is given."""
    job = write_job(tmp_path, braked=True, **SMALL)
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
