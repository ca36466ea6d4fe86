"""Nodes that die, fail again, or take the batch script along: on a real Slurm runs go on, and to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from same_training import checkpoints, repeated_steps
from slurm_cluster import SlurmCluster
from small_job import PATIENCE, CalmRun, both_ways, both_ways_at_length, finish, restarts, submit
from training_job import TrainingJob

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.causes import root_failure
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import NODE_LOST, EventWriter

pytestmark = pytest.mark.timeout(400)


@pytest.mark.newest
@both_ways_at_length
def test_lost_node_is_requeued_elsewhere(cluster: SlurmCluster, calm: CalmRun, tmp_path: Path, via: str) -> None:
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


@pytest.mark.chaos  # other bad hosts: below, and in test_cluster_fault_table.py
@both_ways
def test_host_that_fails_again_is_excluded(cluster: SlurmCluster, calm: CalmRun, tmp_path: Path, via: str) -> None:
    """A rank that is killed there costs no more steps than those since the last checkpoint."""
    training = submit(cluster, tmp_path, "--via", via, braked=True)
    saved: list[int] = []
    for attempt in (0, 1):
        training.wait_for_step(14 + 5 * attempt, attempt=attempt, timeout=PATIENCE)
        saved.append(max(int(path.name.removeprefix("step-")) for path in checkpoints(training.run)))
        cluster.kill(next(iter(cluster.ranks("node2").values())))
        training.wait_for_restart(attempt + 1)
    cluster.wait_for(lambda: cluster.job_info(training.job)["ExcNodeList"] == "node2", 20, "node2 is excluded")
    finish(training, calm, attempts=3)
    third = {e["host"] for e in training.events() if e["event"] == "node-started" and e["attempt"] == 2}
    assert third == {"node1", "node3"}
    assert all(step > saved[0] for step in repeated_steps(training.run))
    for attempt in (0, 1):
        failed = [e for e in training.events() if e["event"] == "rank-failed" and e["attempt"] == attempt]
        # Its peer on the other node may notice first that it is gone; what counts is whom the run blames in the end.
        assert failed and root_failure(failed)["host"] == "node2"


@pytest.mark.chaos
def test_a_host_that_has_lost_what_the_program_reads_is_excluded(
    cluster: SlurmCluster, calm: CalmRun, tmp_path: Path
) -> None:
    """Its error looks like one of the program, and would stall a run that the others could go on with."""
    (data := tmp_path / "data").mkdir()
    (data / "samples").touch()
    training = submit(cluster, tmp_path, braked=True, params={"needs": str(data / "samples")})
    training.wait_for_step(12, timeout=PATIENCE)
    cluster.node_exec("node2", "mount", "-t", "tmpfs", "none", str(data))
    try:
        cluster.run("scontrol", "requeue", str(training.job))
        finish(training, calm, attempts=4)
    finally:
        cluster.node_exec("node2", "umount", str(data), check=False)
    assert cluster.job_info(training.job)["ExcNodeList"] == "node2"


@pytest.mark.chaos
def test_nodes_whose_own_names_lead_to_loopback_meet(cluster: SlurmCluster, calm: CalmRun, tmp_path: Path) -> None:
    """As in Debian's and Ubuntu's /etc/hosts. Gloo listened there, where no other node reached it."""
    known = cluster.node_exec("node1", "cat", "/etc/hosts")
    try:
        for node in cluster.nodes:
            others = [line for line in known.splitlines() if node not in line.split()]
            (hosts := tmp_path / f"hosts-{node}").write_text("\n".join([f"127.0.1.1 {node}", *others, ""]))
            cluster.node_exec(node, "mount", "--bind", str(hosts), "/etc/hosts")
            cluster.node_exec(node, "ip", "route", "add", "default", "dev", "eth0")
        finish(submit(cluster, tmp_path), calm, attempts=1)
    finally:
        for node in cluster.nodes:
            cluster.node_exec(node, "umount", "/etc/hosts", check=False)
            cluster.node_exec(node, "ip", "route", "del", "default", check=False)


@pytest.mark.chaos
@both_ways_at_length
def test_batch_host_that_failed_twice_is_given_back(
    cluster: SlurmCluster, calm: CalmRun, tmp_path: Path, via: str
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
