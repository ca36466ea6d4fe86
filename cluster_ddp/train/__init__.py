"""What runs on each rank: the trainer, and its parts for use in your own script.

task, trainer, session            what a user writes, the training loop, and what surrounds any loop
step, update, nonfinite           from losses to gradients, to new weights or a skipped step, to the end if too many are
optimizer, schedule, precision    the default optimizer, the learning rate, autocast and the scaler
model, comm_hooks, buffers, ema   the network and DDP, its buffers, the average of its weights
evaluation, evaluation_weights    evaluating, with the weights meant for it
metric_names                      what an evaluation will return, read from its source
saving, overlap, stop             when to save, what may go on meanwhile, and how the ranks agree to stop
repeated                          steps that a resume repeats, compared with what they were before
randomness, inner_parts           seeds, and the generators that objects hold
refusals, unsuited_optimizers, communicating   what is refused early, and what must run on all ranks
distributed, meeting              the process group, and one run directory for all ranks
rank, task_rank, failure, errors  a rank as a process, one that trains a task, and how it fails
deferred_dynamo                   an import that ranks put off until they need it
script, spawn, public             scripts that join a run, launch_distributed_training, the public names
probe, profiling                  could a task start, asked on the login node; train.profile

data/      samples and their order        metrics/   what is logged
state/     what checkpoints hold          own/       custom training loops

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
