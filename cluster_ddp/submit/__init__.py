"""The ways to start a run: sbatch and submitit behind one small interface, local, manual; and to resume one.

base, ways, sbatch, submitit       submitting to Slurm; each way is a `Submission`
submitit_job                       what submitit pickles
script, template.sbatch, preamble, quote   the batch script
own_run                            the run of a script that was submitted by hand
local, supervisor, machine, background     on this machine
manual, arrivals                   on several machines without Slurm
rehearsal                          a stop and a resume on this machine, compared with a run without
preflight, check_program, partition_limits, save_time   what is checked before a job is queued
resume, adopting                   continuing a run, and submissions that were interrupted
sweep, element, sweep_here         many runs of one job
first_files                        what `cluster-ddp init` writes
handle                             from Python: `submit`, which returns a `RunHandle`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.submit.handle import RunFailed as RunFailed
    from cluster_ddp.submit.handle import RunHandle as RunHandle
    from cluster_ddp.submit.handle import submit as submit

_PUBLIC = ("submit", "RunHandle", "RunFailed")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module("cluster_ddp.submit.handle"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
