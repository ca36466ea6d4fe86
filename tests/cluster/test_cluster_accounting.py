"""With accounting: preemption by QOS, limits, and what became of jobs that squeue has forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from light_agent import LIGHT_AGENT
from slurm_accounting import QOS_GRACE
from slurm_cluster import CHECKOUT, SlurmCluster
from small_job import ONE_RANK, PATIENCE, STEPS, submit

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.stopfile import read_stop

pytestmark = pytest.mark.timeout(400)

both_ways = pytest.mark.parametrize("via", ["sbatch", pytest.param("submitit", marks=pytest.mark.chaos)])


@both_ways
def test_preempted_by_a_qos_within_its_grace(
    accounting_cluster: SlurmCluster, tmp_path: Path, via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = accounting_cluster
    monkeypatch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)
    training = submit(cluster, tmp_path, "--via", via, braked=True, **ONE_RANK)
    training.wait_for_step(5, timeout=PATIENCE)
    cluster.preempt(training.job)
    training.wait_for_restart(1, timeout=PATIENCE)
    training.full_speed()
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", 2, STEPS), training.story()
    reasons = [event["reason"] for event in training.events() if event["event"] == "requeued"]
    assert reasons == ["stopped: preemption"]


@pytest.mark.chaos
def test_cancelled_within_the_grace_of_a_qos(accounting_cluster: SlurmCluster, tmp_path: Path) -> None:
    """No partition gives a grace here: only the QOS tells this end from that of the grace."""
    cluster = accounting_cluster
    cluster.run("scontrol", "update", "PartitionName=debug", "GraceTime=0")
    slow = {"brake": str(tmp_path / "brake"), "width": 8, "seconds": QOS_GRACE}  # no step ends while it is cancelled
    training = submit(cluster, tmp_path, braked=True, params=slow, **ONE_RANK)
    cluster.wait_for(lambda: any(e["event"] == "started" for e in training.events()), PATIENCE, "it trains")
    cluster.preempt(training.job)

    def in_grace() -> bool:
        return cluster.job_info(training.job).get("PreemptTime", "None") != "None"

    cluster.wait_for(in_grace, PATIENCE, "it is preempted", every=0.05)
    time.sleep(2.5)  # Slurm's clock has whole seconds
    cluster.cancel(training.job)
    cluster.wait_for(lambda: training.job not in cluster.queue(), PATIENCE, "it is over")
    assert cluster.state(training.job) == "CANCELLED", training.story()
    assert training.status()["state"] == "CANCELLED", training.story()
    assert (request := read_stop(RunDirectory(training.run).attempt(0))) is not None and request.reason == "cancel"


@pytest.mark.parametrize("key", ["account", "qos"])
@pytest.mark.parametrize("check", [(), ("--no-check",)])
def test_an_account_or_a_qos_of_others_is_refused(
    accounting_cluster: SlurmCluster, tmp_path: Path, key: str, check: tuple[str, ...]
) -> None:
    job, runs = str(CHECKOUT / "job_templates" / "cpu.yaml"), tmp_path / "runs"
    asked = ("submit", job, *check, "--set", f"slurm.{key}=nosuch", "--set", f"runs_dir={runs}")
    done = accounting_cluster.cli(*asked, check=False, timeout=250)
    assert done.returncode == 3 and f"Invalid {key}" in done.stderr, done.stderr
    assert f"What to do: slurm.{key}: to list yours: sacctmgr show assoc" in done.stderr
    assert not runs.exists() or not list(runs.iterdir())


@pytest.mark.newest
def test_limit_is_told_and_a_forgotten_job_is_looked_up(accounting_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster = accounting_cluster
    training = submit(cluster, tmp_path, slurm={"qos": "one-node"})
    cluster.wait_for(lambda: "Limit" in cluster.job_info(training.job)["Reason"], PATIENCE, "the limit holds it back")
    status = training.status()
    assert status["state"] == "PENDING"
    assert status["reason"].startswith("the QOS limits the nodes of one user"), status
    cluster.cancel(training.job)
    assert training.status()["state"] == "CANCELLED"
    with cluster.configured("MinJobAge=2"):
        cluster.wait_for(lambda: not cluster.state(training.job), PATIENCE, "slurmctld forgets the job", every=1)
    status = training.status()
    assert status["state"] == "CANCELLED", status
    assert str(training.job) in status["reason"]
