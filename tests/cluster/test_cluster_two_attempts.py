"""A node that is cut from Slurm's controller, but not from the storage: two attempts of one run train at once."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from same_training import assert_same_training, newest_manifest
from slurm_cluster import SlurmCluster
from small_job import PATIENCE, STEPS, CalmRun, end, submit
from training_job import TrainingJob

pytestmark = pytest.mark.timeout(600)

NODE_PROGRAM = r"^\S*python\S* (-\S+ )*-m cluster_ddp\.launch\.node "


def _told(training: TrainingJob, name: str, attempt: int) -> list[dict[str, Any]]:
    return [event for event in training.events() if event["event"] == name and event["attempt"] == attempt]


@pytest.mark.parametrize("via", ["sbatch", pytest.param("submitit", marks=pytest.mark.chaos)])
@pytest.mark.usefixtures("light")
def test_attempt_on_a_node_that_was_cut_off_counts_for_nothing_once_a_newer_one_trains(
    cluster: SlurmCluster, calm: CalmRun, tmp_path: Path, via: str
) -> None:
    """Its node program stands still, so that nothing but its own question keeps it from saving beside the other.

    Its ranks stand still as well until the other trains, however long Slurm takes to give the node up.
    """
    one_node = {"slurm": {"nodes": 1}, "launch": {"procs_per_node": 2}}
    training = submit(cluster, tmp_path, "--via", via, braked=True, **one_node)
    training.wait_for_step(12, timeout=PATIENCE)
    (host,) = {event["host"] for event in _told(training, "node-started", 0)}
    cluster.cut_from_controller(host)
    programs, ranks = cluster.processes(host, NODE_PROGRAM), list(cluster.ranks(host).values())
    assert programs and len(ranks) == 2
    for process in (*programs, *ranks):
        cluster.kill(process, signal.SIGSTOP)
    try:
        cluster.wait_for(lambda: _told(training, "resumed", 1), PATIENCE, f"attempt 1 trains\n{training.story()}")
        for rank in ranks:
            cluster.kill(rank, signal.SIGCONT)
        refused = cluster.wait_for(
            lambda: _told(training, "checkpoint-skipped", 0), PATIENCE, f"attempt 0 wants to save\n{training.story()}"
        )
    finally:
        for process in (*programs, *ranks):
            cluster.kill(process, signal.SIGCONT)
    origin = json.loads((training.run / "attempts/001/origin.json").read_text())
    assert refused[0]["step"] > origin["step"] >= 10
    cluster.wait_for(lambda: _told(training, "node-finished", 0), 60, f"attempt 0 ends\n{training.story()}")
    training.wait_for_step(origin["step"] + 3, attempt=1, timeout=PATIENCE)
    cluster.run("scontrol", "requeue", str(training.job))
    cluster.wait_for(lambda: cluster.job_info(training.job)["ExcNodeList"] == host, 60, f"{host} is excluded")
    training.wait_for_step(origin["step"] + 4, attempt=2, timeout=PATIENCE)

    cluster.cli("stop", str(training.run), timeout=PATIENCE)
    status = end(training, "COMPLETED")
    assert (status["state"], status["step"]) == ("STOPPED", status["last_checkpoint"]), training.story()
    assert newest_manifest(training.run)["attempt"] == 2
    assert any(f"node {host} still ran attempt 0 until" in text for text in status["warnings"]), status
    assert any("cut from the controller" in text for text in status["warnings"])

    options = ("--set", "requeue.max_requeues=9", "--json")
    answer = json.loads(cluster.cli("resume", str(training.run), *options).stdout.splitlines()[-1])
    again = replace(training, job=int(answer["slurm_job_id"]))
    again.full_speed()
    final = again.finish(timeout=PATIENCE)
    assert (final["state"], final["attempts"], final["step"]) == ("COMPLETED", 4, STEPS), again.story()
    assert [event["step"] for event in _told(again, "resumed", 3)] == [status["step"]]
    assert_same_training(again.run, calm.run)
