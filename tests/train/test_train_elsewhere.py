"""The library trains where there is neither SIGUSR1 nor fcntl, as on Windows: simulated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import signal, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGURG", "SIGALRM"):
    delattr(signal, name)
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import cluster_ddp.train.public, cluster_ddp.launch.address, cluster_ddp.launch.node.__main__, cluster_ddp.cli.app
from cluster_ddp.job import JobSpec
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import SampleStream, Task, Trainer, join_run

class Small(Task):
    def model(self): return nn.Linear(3, 1)
    def train_data(self): return TensorDataset(torch.ones(8, 3))
    def loss(self, model, batch): return model(batch[0]).mean()

job = JobSpec(name="w", task="w:W", train={"steps": 2, "batch_size": 4, "workers": 1})
run = create_run(job, runs_dir=Path("runs"), via="local", script=None)
assert Trainer(job, Small(), run).run().completed
with join_run("by-hand") as run:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.resume(model, optimizer, SampleStream(8, 4, 0), total_steps=1)
    run.begin_step()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    run.end_step()
print("trained")
"""


def test_the_library_trains_where_there_is_neither_fcntl_nor_sigusr1(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.endswith("trained\n"), done.stderr[-1500:]
