"""The ways to start a run: sbatch and submitit behind one small interface, local, manual; and to resume one.

base, ways, sbatch, submitit       submitting to Slurm; each way is a `Submission`
submitit_job                       what submitit pickles
script, template.sbatch, preamble, quote   the batch script
own_run                            the run of a script that was submitted by hand
local, supervisor, machine, background     on this machine
manual, arrivals                   on several machines without Slurm
rehearsal                          a stop and a resume on this machine, compared with a run without
preflight, check_program, partition_limits, save_time   what is checked before a job is queued
refused                            what to do when Slurm refuses it
resume, adopting                   continuing a run, and submissions that were interrupted
sweep, element, sweep_here         many runs of one job
first_files                        what `cluster-ddp init` writes
handle, public                     from Python: `submit`, which returns a `RunHandle`; the public names
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.submit.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        public = importlib.import_module("cluster_ddp.submit.public")
        if name in vars(public):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
