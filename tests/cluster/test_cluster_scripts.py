"""Scripts of one's own on a real Slurm: a loop that has joined its run, and a script as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from light_agent import LIGHT_AGENT
from same_training import newest_tensors, repeated_steps
from slurm_cluster import SlurmCluster
from training_job import PATIENCE, TrainingJob, submit_script

pytestmark = pytest.mark.timeout(900)

STEPS = 60


def test_a_loop_of_ones_own_is_preempted_stopped_and_resumed_exactly(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resumed by torchrun; the attempts before, and the calm run, have light agents."""

    def begin(name: str) -> TrainingJob:
        folder = tmp_path / name
        folder.mkdir()
        if name == "broken":
            (folder / "brake").touch()
        sections: dict[str, Any] = {"launch": {"procs_per_node": 2}, "log": {"every_steps": 1}}
        with monkeypatch.context() as patch:
            patch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)
            return submit_script(cluster, folder, "braked_loop.py", folder / "brake", **sections)

    training = begin("broken")
    training.wait_for_step(3)
    cluster.preempt(training.job)
    training.wait_for_restart(1)
    training.wait_for_step(4, attempt=1)
    cluster.cli("stop", str(training.run))
    training.finish()
    stopped = training.status()
    assert (stopped["state"], stopped["attempts"]) == ("STOPPED", 2)
    assert stopped["last_checkpoint"] == stopped["step"] < STEPS
    training.full_speed()
    calm = begin("calm")
    answer = json.loads(cluster.cli("resume", str(training.run), "--json").stdout.splitlines()[-1])
    training.job = int(answer["slurm_job_id"])
    status = training.finish()
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", 3, STEPS)
    assert repeated_steps(training.run) == []
    calm.finish()
    expected, found = newest_tensors(calm.run), newest_tensors(training.run)
    assert expected.keys() == found.keys() and all(expected[name].equal(found[name]) for name in expected)
    logs = [log.read_text() for log in sorted(training.run.glob("attempts/*/node-0.log"))]
    assert [text.count("after the loop") for text in logs] == [0, 0, 2]


@pytest.mark.usefixtures("light")
def test_a_script_as_it_is_is_told_requeued_and_given_other_arguments(cluster: SlurmCluster, tmp_path: Path) -> None:
    end = tmp_path / "end"
    training = submit_script(cluster, tmp_path, "counting_script.py", end, args_on_resume=["--resume"])

    def said(attempt: int) -> str:
        return "".join(log.read_text() for log in training.run.glob(f"attempts/{attempt:03d}/node-*.log"))

    cluster.wait_for(lambda: "goes on from 0" in said(0), PATIENCE, f"it counts\n{training.story()}")
    assert "unknown (the script does not report any)" in cluster.cli("status", str(training.run)).stdout
    cluster.preempt(training.job)
    training.wait_for_restart(1)
    cluster.wait_for(lambda: "attempt 1 goes on" in said(1), PATIENCE, f"it goes on\n{training.story()}")
    count = int((tmp_path / "saved").read_text())
    assert count > 0 and f"attempt 1 goes on from {count}\n" in said(1)
    end.touch()
    status = training.finish()
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", 2, None), training.story()
