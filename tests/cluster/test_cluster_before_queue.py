"""What a real Slurm says before a job waits in its queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, SlurmCluster

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("setting", "status", "said"),
    [
        ("slurm.cpus_per_task=32", 2, "32 is more than any node of partition debug has: 8"),
        ("slurm.gpus_per_node=5", 2, "5 is more than any node of partition debug has: 4"),
        ("slurm.nodes=4", 2, "4 is more than partition debug has"),
        ("slurm.partition=debugg", 2, "Did you mean debug?"),
        ("slurm.constraint=nosuch", 3, "What to do: slurm.constraint: sinfo -o '%P %f'"),
    ],
)
def test_a_job_that_could_never_start_is_refused(
    cluster: SlurmCluster, tmp_path: Path, setting: str, status: int, said: str
) -> None:
    job = str(CHECKOUT / "job_templates" / "cpu.yaml")
    done = cluster.cli(
        "submit", job, "--set", setting, "--set", f"runs_dir={tmp_path / 'runs'}", check=False, timeout=250
    )
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert not (tmp_path / "runs").exists()
