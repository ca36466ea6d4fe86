"""What a real Slurm says before a job waits in its queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, SlurmCluster

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("via", "setting", "status", "said"),
    [
        ("sbatch", "slurm.cpus_per_task=32", 2, "32 is more than any node of partition debug has: 8"),
        ("sbatch", "slurm.gpus_per_node=5", 2, "5 is more than any node of partition debug has: 4"),
        ("sbatch", "slurm.nodes=4", 2, "4 is more than partition debug has"),
        ("sbatch", "slurm.partition=debugg", 2, "Did you mean debug?"),
        ("sbatch", "slurm.constraint=nosuch", 3, "What to do: slurm.constraint: sinfo -o '%P %f'"),
        ("submitit", "slurm.constraint=nosuch", 3, "What to do: slurm.constraint: sinfo -o '%P %f'"),
    ],
)
def test_a_job_that_could_never_start_is_refused(
    cluster: SlurmCluster, tmp_path: Path, via: str, setting: str, status: int, said: str
) -> None:
    job = str(CHECKOUT / "job_templates" / "cpu.yaml")
    asked = ("submit", job, f"--via={via}", "--set", setting, "--set", f"runs_dir={tmp_path / 'runs'}")
    done = cluster.cli(*asked, check=False, timeout=250)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_first_files_run_as_they_are(cluster: SlurmCluster, tmp_path: Path) -> None:
    env = {**cluster.env, "CLUSTER_DDP_CONFIG": str(tmp_path / "config/site.yaml"), "SCRATCH": str(tmp_path)}
    cluster.cli("init", cwd=tmp_path, env=env)
    done = cluster.cli("submit", "job.yaml", "--json", cwd=tmp_path, env=env, timeout=250)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["state"] == "PENDING"
    assert Path(answer["directory"]).parent == tmp_path / "cluster_ddp_runs"
    cluster.wait_for_state(int(answer["slurm_job_id"]), "RUNNING")
    cluster.cli("cancel", answer["directory"], cwd=tmp_path, env=env, check=False)
