"""An expedited requeue (``slurm.extra: {requeue: expedite}``): Slurm 25.11 and later, where the site allows it.

Slurm starts such a job again at once after a node failure, but also after any exit status but 0, and then holds it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from training_job import PATIENCE, submit, write_job

pytestmark = pytest.mark.timeout(400)

EXPEDITED = {"nodes": 2, "time": "00:20:00", "extra": {"requeue": "expedite"}}


def test_run_that_fails_is_not_held(cluster: SlurmCluster, tmp_path: Path) -> None:
    if cluster.version < (25, 11):
        refused = cluster.cli("submit", str(write_job(tmp_path, braked=False, slurm=EXPEDITED)), check=False)
        assert refused.returncode == 3 and "requeue" in refused.stderr, refused.stderr
        return
    training = submit(cluster, tmp_path, slurm=EXPEDITED, params={"brake": str(tmp_path / "brake"), "width": "wide"})
    cluster.wait_for_state(training.job, "FAILED", timeout=PATIENCE)
    status = training.status()
    assert (status["state"], status["attempts"]) == ("FAILED", 1), training.story()
    assert cluster.queue() == []


def test_lost_node_brings_the_run_back_at_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    if cluster.version < (25, 11):
        return  # refused there, as the test above has seen
    training = submit(cluster, tmp_path, slurm=EXPEDITED)
    training.wait_for_step(12, timeout=PATIENCE)
    (lost,) = {e["host"] for e in training.events() if e["event"] == "node-started" and e["node"] == 1}
    cluster.crash_node(lost)
    training.wait_for_restart(1)
    cluster.boot_node(lost)
    training.full_speed()
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"]) == ("COMPLETED", 2), json.dumps(status)
