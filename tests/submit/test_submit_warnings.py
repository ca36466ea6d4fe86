"""What the trainer warns of is not left in a rank's log: a local run's console and `status` tell it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from light_agent import LIGHT_AGENT

JOB = """\
name: warned
task: cluster_ddp.tasks.digits:Digits
params: {width: 8}
train: {steps: 2, batch_size: 8, sync_batchnorm: true}
launch: {procs_per_node: 2}
"""
WARNING = "train.sync_batchnorm: torch has no SyncBatchNorm on cpu"


def test_what_training_warns_of_reaches_the_console_and_status(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    environment |= {"PYTHONPATH": LIGHT_AGENT, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cluster_ddp", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | {"COLUMNS": "300"}, capture_output=True, text=True, timeout=200
        )

    done = call("local", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f": {WARNING}") == 1, "once, though both ranks say it"
    run = json.loads(done.stdout)["run_id"]
    (told,) = json.loads(call("status", run, "--json").stdout)["warnings"]
    assert told.startswith(WARNING)
    assert WARNING in call("status", run).stdout
