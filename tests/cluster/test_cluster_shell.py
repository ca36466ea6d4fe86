"""What the shell that submits has left over, its current folder and its umask, harm no run on a real Slurm."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from small_job import PATIENCE, SMALL
from training_job import TrainingJob, write_job

pytestmark = pytest.mark.timeout(900)

LEFT_OVER = {
    "RANK": "0", "LOCAL_RANK": "3", "WORLD_SIZE": "7", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1",
    "PET_NNODES": "9", "PET_NPROC_PER_NODE": "5", "TORCHELASTIC_RUN_ID": "old", "PYTHONOPTIMIZE": "2",
}  # fmt: skip


def test_a_run_completes_whatever_the_shell_holds(cluster: SlurmCluster, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for module in ("json", "select", "socket", "torch"):
        (here / f"{module}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{module} ')\n")
    job = write_job(here, braked=False, **SMALL)
    program = str(Path(sys.executable).with_name("cluster-ddp"))
    submit = ("bash", "-c", 'umask 000; exec "$0" "$@"', program, "submit", str(job), "--json", "--no-check")
    done = cluster.call(*submit, cwd=here, env={**cluster.env, **LEFT_OVER}, timeout=200)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    training = TrainingJob(cluster, int(answer["slurm_job_id"]), Path(answer["directory"]), here / "brake")
    assert training.finish(timeout=PATIENCE)["state"] == "COMPLETED"
    assert not (tmp_path / "imported").exists()
    modes = {path: path.lstat().st_mode for path in [training.run, *training.run.rglob("*")]}
    assert not [path for path, mode in modes.items() if mode & (stat.S_IWGRP | stat.S_IWOTH)]
