"""What the shell that submits has left over, its current folder and its umask, harm no run on a real Slurm.

What it exports for the network, and what training warns of, is told where a person looks.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from small_job import PATIENCE, SMALL, both_ways_at_length
from training_job import TrainingJob, write_job

pytestmark = pytest.mark.timeout(900)

LEFT_OVER = {
    "RANK": "0", "LOCAL_RANK": "3", "WORLD_SIZE": "7", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1",
    "PET_NNODES": "9", "PET_NPROC_PER_NODE": "5", "TORCHELASTIC_RUN_ID": "old", "PYTHONOPTIMIZE": "2",
}  # fmt: skip
# With PYTHONOPTIMIZE, Python compiles all of torch again: once on one node.
ONE_NODE = {"slurm": {"nodes": 1}, "launch": {"procs_per_node": 2}}


def test_a_run_completes_whatever_the_shell_holds(cluster: SlurmCluster, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for module in ("json", "select", "socket", "torch"):
        (here / f"{module}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{module} ')\n")
    job = write_job(here, braked=False, **{**SMALL, **ONE_NODE})
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


@both_ways_at_length
@pytest.mark.usefixtures("light")
def test_what_was_exported_and_what_training_warns_of_is_told(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    train = {"epochs": 1, "sync_batchnorm": True}
    network = {"profile": "ethernet", "ib_disable": True}
    job = write_job(tmp_path, braked=False, **{**SMALL, "train": train, "network": network})
    exported = {"NCCL_IB_DISABLE": "0", "NCCL_SOCKET_NTHREADS": "2", "NCCL_DEBUG": "INFO", "NCCL_TIMEOUT": "900"}
    program = str(Path(sys.executable).with_name("cluster-ddp"))
    submit = (program, "submit", str(job), "--json", "--no-check", "--via", via)
    done = cluster.call(*submit, cwd=tmp_path, env={**cluster.env, **exported}, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [done.stderr.count(f"{name}={value} is exported") for name, value in exported.items()] == [1, 1, 1, 1]
    answer = json.loads(done.stdout.splitlines()[-1])
    training = TrainingJob(cluster, int(answer["slurm_job_id"]), Path(answer["directory"]), tmp_path / "brake")
    status = training.finish(timeout=PATIENCE)
    for node in (0, 1):
        report = json.loads((training.run / f"attempts/000/environment-{node}.json").read_text())
        in_force = [report["variables"][name] for name in ("NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_DEBUG")]
        assert in_force == ["1", "2", "INFO"], "the job's key counts, then what was exported, then the profile"
    warning = "train.sync_batchnorm: torch has no SyncBatchNorm on cpu"
    assert [text for text in status["warnings"] if text.startswith(warning)] == status["warnings"] != []
    assert warning in " ".join(cluster.cli("status", str(training.run)).stdout.split())
    (output,) = [*training.run.glob("slurm-*.out"), *training.run.glob("submitit/*.out")]
    assert output.read_text().count(f": {warning}") == 2, "once for each node"
