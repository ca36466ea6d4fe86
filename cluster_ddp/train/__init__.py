"""What runs on each rank: the trainer, and its parts for use in your own script.

task, trainer, session            what a user writes, the training loop, and what surrounds any loop
step, update, nonfinite           from losses to gradients, to new weights or a skipped step, to the end if too many are
optimizer, schedule, precision    the default optimizer, the learning rate, autocast and the scaler
model, buffers, ema               the network and DDP, its buffers, the average of its weights
recomputing                       activation checkpointing
saving, overlap                   when to save, and what may go on meanwhile
repeated                          steps that a resume repeats, compared with what they were before
randomness                        seeds, and the generators that objects hold
errors                            the errors of a rank
task_rank, public                 ranks that train a task, the public names
probe, profiling                  could a task start, asked on the login node; train.profile

data/        samples and their order         metrics/   what is logged
state/       what checkpoints hold           objects/   what the user's objects hold
ranks/       processes that train together   own/       custom training loops
evaluation/  what is measured on other data  checks/    what is refused or told early

The public names are listed in `cluster_ddp.train.public` and imported lazily: login nodes import this package without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.train.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "Task":  # task files import it, also on login nodes, which do not train
        return importlib.import_module("cluster_ddp.train.task").Task
    if not name.startswith("_"):
        public = importlib.import_module("cluster_ddp.train.public")
        if name in vars(public):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
