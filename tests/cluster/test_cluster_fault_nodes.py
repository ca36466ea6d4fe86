"""Nodes that are bad, on a real Slurm: found, named and left, whichever way the run was submitted.

Each case does its harm to one node of three before a run of two is submitted to it, and says how the run is to end, in
how many attempts, and what `status` is to say of the first of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from same_training import assert_same_training
from slurm_cluster import SlurmCluster
from test_cluster_faults import PATIENCE, STEPS, both_ways, calm, submit
from training_job import TrainingJob

from cluster_ddp.launch.ports import job_port

__all__ = ["calm"]

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class BadNode:
    """A harm to one node.

    Attributes
    ----------
    harm
        Does it to node 2, given the folder of the runs.
    undo
        Undoes it.
    words
        What the reason of each requeue says besides the node's name.
    short
        Part of the default run.
    """

    harm: Callable[[SlurmCluster, Path], object]
    undo: Callable[[SlurmCluster, Path], object]
    words: str
    short: bool = False


ATTEMPTS = 3  # two on the bad node, and one without it


BAD = "node2"


def _in_node(*command: str) -> Callable[[SlurmCluster, Path], object]:
    """A command inside the node, in which RUNS and PYTHON stand for the folder of the runs and the environment's."""

    def act(cluster: SlurmCluster, runs: Path) -> object:
        names = {"RUNS": str(runs), "PYTHON": str(Path(sys.executable).parent)}
        return cluster.node_exec(BAD, *(names.get(word, word) for word in command))

    return act


CASES = {
    "runs folder hidden": BadNode(
        _in_node("mount", "-t", "tmpfs", "none", "RUNS"),
        _in_node("umount", "RUNS"),
        "has to be the same and writable",
        short=True,
    ),
    "runs folder read-only": BadNode(
        _in_node("sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', "RUNS"),
        _in_node("umount", "RUNS"),
        "has to be the same and writable",
    ),
    "python missing": BadNode(
        _in_node("mount", "-t", "tmpfs", "none", "PYTHON"), _in_node("umount", "PYTHON"), "Exited with exit code 2"
    ),
    "memory disk full": BadNode(
        _in_node("sh", "-c", "mount -t tmpfs -o size=4k none /dev/shm; dd if=/dev/zero of=/dev/shm/x bs=4k count=1"),
        _in_node("umount", "/dev/shm"),
        "make room there",
    ),
}  # fmt: skip


def _cases() -> list[object]:
    return [pytest.param(case, marks=[] if CASES[case].short else [pytest.mark.chaos]) for case in CASES]


@both_ways
@pytest.mark.parametrize("case", _cases())
def test_bad_node_is_named_and_left(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str, case: str
) -> None:
    bad = CASES[case]
    runs = tmp_path / "runs"
    runs.mkdir()
    bad.harm(cluster, runs)
    try:
        training = submit(cluster, tmp_path, "--via", via)
        status = training.finish(timeout=PATIENCE)
    finally:
        bad.undo(cluster, runs)
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", ATTEMPTS, STEPS), training.story()
    assert_same_training(training.run, calm.run)
    reasons = [event["reason"] for event in training.events() if event["event"] == "requeued"]
    assert len(reasons) == ATTEMPTS - 1
    for reason in reasons:
        assert f"node {BAD} failed" in reason
        assert bad.words in reason
    failed = {(event["host"], event["attempt"]) for event in training.events() if event["event"] == "node-failed"}
    assert failed == {(BAD, attempt) for attempt in range(ATTEMPTS - 1)}


@both_ways
def test_rendezvous_port_that_is_taken_is_passed_over(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str
) -> None:
    """The port that the job's id gives is taken on all nodes: the keeper tries it, and takes another."""
    next_job = int(cluster.run("sbatch", "--parsable", "--wrap=true", "--output=/dev/null")) + 1
    listen = f"import socket, time; s = socket.create_server(('', {job_port(next_job)})); time.sleep(600)"
    for node in cluster.nodes:
        cluster.node_spawn(node, sys.executable, "-c", listen)
    training = submit(cluster, tmp_path, "--via", via)
    assert training.job == next_job
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", 1, STEPS), training.story()
    assert_same_training(training.run, calm.run)


@pytest.mark.chaos
@both_ways
def test_node_whose_processes_vanish_is_given_up_once_the_other_has_signed_off(
    cluster: SlurmCluster, calm: TrainingJob, tmp_path: Path, via: str
) -> None:
    """As after a reboot within SlurmdTimeout: slurmd answers, and srun would wait for the dead task without end."""
    training = submit(cluster, tmp_path, "--via", via, braked=True)
    training.wait_for_step(12, timeout=PATIENCE)
    (host,) = {event["host"] for event in training.events() if event["event"] == "node-started" and event["node"] == 1}
    for process in cluster.processes(host, r"slurmstepd: \[\d+\.0\]|cluster_ddp"):
        cluster.kill(process)
    training.wait_for_restart(1, timeout=PATIENCE)
    training.full_speed()
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", 2, STEPS), training.story()
    assert_same_training(training.run, calm.run)
    lost = [(event["attempt"], event["host"]) for event in training.events() if event["event"] == "node-lost"]
    assert lost == [(0, host)]
    reason = next(event["reason"] for event in training.events() if event["event"] == "requeued")
    assert host in reason
