"""A job that is submitted from inside another one: its own resources, the code as it was then, and word of its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.timeout(400)

SCRIPT = """\
import os, pathlib, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.2)
import helper
pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(f"{helper.NAME} {os.environ['WORLD_SIZE']}")
"""


def test_what_was_edited_after_the_submission_is_not_run_and_the_end_is_told(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    project, go, notice = tmp_path / "project", tmp_path / "go", tmp_path / "notice"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    job = {
        "name": "inside", "script": "train.py", "args": [str(go)], "runs_dir": str(tmp_path / "runs"),
        "slurm": {"nodes": 2, "time": "00:10:00"}, "launch": {"procs_per_node": 1, "snapshot": True},
        "notify": {"command": f"cat >>{notice}; exit 3", "on": ["completed"]},
    }  # fmt: skip
    (project / "job.yaml").write_text(yaml.safe_dump(job))
    for arguments in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1"),
    ):
        subprocess.run(["git", "-C", str(project), *arguments], check=True, capture_output=True)
    (project / "helper.py").write_text("NAME = 'as submitted'\n")

    command = [sys.executable, "-m", "cluster_ddp", "submit", "job.yaml", "--json", "--no-check"]
    said = cluster.run("srun", "--nodes=1", "--ntasks=1", "--immediate=60", *command, cwd=project, timeout=200)
    answer = json.loads(said.splitlines()[-1])
    (project / "helper.py").write_text("NAME = 'edited'\n")
    (project / "train.py").write_text("raise SystemExit('edited')\n")
    go.touch()
    slurm_job, run = int(answer["slurm_job_id"]), Path(answer["directory"])
    cluster.wait_for(notice.exists, 200, f"its end is told\n{cluster.job_info(slurm_job)}")
    cluster.wait_for_state(slurm_job, "COMPLETED")

    assert [Path(f"{go}{rank}").read_text() for rank in (0, 1)] == ["as submitted 2"] * 2
    assert (run / "changes.diff").exists() and (run / "code" / "helper.py").exists()
    told = json.loads(notice.read_text())
    assert (told["run_id"], told["state"], told["slurm_job_id"]) == (run.name, "COMPLETED", str(slurm_job))
    status = json.loads(cluster.cli("status", str(run), "--json", timeout=180).stdout)
    assert status["state"] == "COMPLETED", "a notice that fails changes nothing"
    assert any("notify.command: exited with status 3" in text for text in status["warnings"])
