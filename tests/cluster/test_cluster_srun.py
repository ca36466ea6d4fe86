"""What srun tells its tasks, which differs from release to release."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from small_job import PATIENCE
from training_job import submit_script, write_job

MEET = """
import torch
from cluster_ddp.train import cleanup_distributed, reduce_tensor, setup_distributed

world = setup_distributed(timeout=120)
print(world.rank, reduce_tensor(torch.ones(1), "sum").item())
cleanup_distributed()
"""


def test_ranks_of_srun_meet_on_the_first_node_wherever_rank_0_is(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm 26.05 numbers tasks by the topology; here they are numbered backwards on all releases."""
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "task.sh").write_text(
        f"export SLURM_PROCID=$((1 - SLURM_PROCID))\nexec {sys.executable} {tmp_path}/meet.py\n"
    )
    address = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    job = cluster.sbatch(address, f"srun bash {tmp_path}/task.sh", nodes=2, output=tmp_path / "out")
    cluster.wait_for_state(job, "COMPLETED", "FAILED", timeout=PATIENCE)
    said = (tmp_path / "out").read_text()
    assert {"0 2.0", "1 2.0"} <= set(said.splitlines()), said


@pytest.mark.parametrize(
    ("via", "gpu_option"),
    [
        ("sbatch", "gres"),
        pytest.param("submitit", "gres", marks=pytest.mark.chaos),
        pytest.param("sbatch", "gpus-per-node", marks=pytest.mark.chaos),
        pytest.param("submitit", "gpus-per-node", marks=pytest.mark.chaos),
    ],
)
def test_node_programs_have_the_cpus_that_the_job_asks_for(
    cluster: SlurmCluster, tmp_path: Path, via: str, gpu_option: str
) -> None:
    asked = {"nodes": 2, "cpus_per_task": 3, "gpus_per_node": 1, "gpu_option": gpu_option}
    end = tmp_path / "end"
    end.touch()
    training = submit_script(cluster, tmp_path, "counting_script.py", end, "--via", via, slurm=asked)
    status = training.finish(timeout=PATIENCE)
    assert (status["state"], status["attempts"]) == ("COMPLETED", 1), training.story()
    reports = [json.loads(path.read_text()) for path in sorted(training.run.glob("attempts/000/environment-*.json"))]
    assert len(reports) == 2
    for report in reports:
        assert report["variables"]["SLURM_CPUS_PER_TASK"] == "3"


@pytest.mark.parametrize(
    ("gpu_option", "left_over"), [("gpus-per-node", "SBATCH_GRES"), ("gres", "SBATCH_GPUS_PER_NODE")]
)
def test_gpus_that_the_shell_asks_for_in_the_other_way(
    cluster: SlurmCluster, tmp_path: Path, gpu_option: str, left_over: str
) -> None:
    """Slurm 26.05 refuses to be asked in both ways; before, they may say the same."""
    asked = {"hold": True} if cluster.version < (26, 5) else {}
    slurm = {"gpus_per_node": 2, "gpu_option": gpu_option, "extra": asked}
    job = write_job(tmp_path, braked=False, slurm=slurm)
    env = {left_over: "2" if gpu_option == "gres" else "gpu:2"}
    done = cluster.cli("submit", str(job), "--no-check", env=env, check=False, timeout=200)
    if cluster.version < (26, 5):
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 3, done.stderr
    assert "mutually exclusive" in done.stderr and "unset SBATCH_GRES" in done.stderr, done.stderr
