"""What `benchmarks/resume_time.py` resumes: a task for this package, and the same as a script for a bare torchrun.

As a script it does what people write by hand: import torch, rendezvous, build the model, DDP, torch.load, one step::

    torchrun ... benchmarks/resume_task.py --weights-mib 32 --mark FILE --save FILE     # make the checkpoint
    torchrun ... benchmarks/resume_task.py --weights-mib 32 --mark FILE --load FILE     # go on from it
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from cluster_ddp.train import Task

WIDTH = 1024
MIB_OF_A_LAYER = WIDTH * WIDTH * 4 / 2**20
BATCH = 8
SAMPLES = 4096


def build(weights_mib: float) -> nn.Module:
    """Build a model whose weights take about so many MiB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(max(1, round(weights_mib / MIB_OF_A_LAYER))):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def mark_first_step(optimizer: Optimizer, file: Path) -> None:
    """Have rank 0 append a line "time node pid" to the file when the optimizer has made its first step."""
    marked = False

    def mark(*_: Any) -> None:
        nonlocal marked
        if not marked and os.environ.get("RANK", "0") == "0":
            with file.open("a") as lines:
                lines.write(f"{time.time()} {os.environ.get('SLURMD_NODENAME', 'localhost')} {os.getpid()}\n")
        marked = True

    optimizer.register_step_post_hook(mark)


class Heavy(Task):
    """A model with as many weights as one likes, on data that do not matter."""

    def __init__(self, weights_mib: float, mark: str) -> None:
        self.weights_mib = weights_mib
        self.mark = Path(mark)

    def model(self) -> nn.Module:
        """Build the model."""
        return build(self.weights_mib)

    def train_data(self) -> TensorDataset:
        """Give random vectors, shape (4096, 1024)."""
        return TensorDataset(torch.randn(SAMPLES, WIDTH))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        """Compute how badly the model repeats its input."""
        return F.mse_loss(model(batch[0]), batch[0])

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Make the optimizer of both, which marks its first step."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        mark_first_step(optimizer, self.mark)
        return optimizer


def main() -> None:
    """Be a rank of the bare training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights-mib", type=float, required=True)
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = build(options.weights_mib)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mark_first_step(optimizer, options.mark)
    if options.load is not None:
        state = torch.load(options.load, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    batch = torch.randn(BATCH, WIDTH)
    F.mse_loss(wrapped(batch), batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if options.save is not None and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
