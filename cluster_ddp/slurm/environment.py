"""The environment in which Slurm's commands are called.

A shell may set options for them (``SBATCH_PARTITION``, ``SQUEUE_PARTITION`` and the like). sbatch lets these override
the ``#SBATCH`` lines of a script. Here the job file wins: a variable counts only if the script has no such line. And
commands that query or cancel a job act on the given job, whatever filters the shell sets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_VARIABLES = {
    "account": ("SBATCH_ACCOUNT",),
    "constraint": ("SBATCH_CONSTRAINT",),
    "export": ("SBATCH_EXPORT",),
    "gpus-per-node": ("SBATCH_GPUS_PER_NODE",),
    "gres": ("SBATCH_GRES",),
    "job-name": ("SBATCH_JOB_NAME",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "open-mode": ("SBATCH_OPEN_MODE",),
    "partition": ("SBATCH_PARTITION",),
    "qos": ("SBATCH_QOS",),
    "requeue": ("SBATCH_NO_REQUEUE",),
    "no-requeue": ("SBATCH_REQUEUE",),
    "reservation": ("SBATCH_RESERVATION",),
    "signal": ("SBATCH_SIGNAL",),
    "time": ("SBATCH_TIMELIMIT",),
}
"""By option: the variables that would override it, or that sbatch refuses together with it."""

_NEVER = frozenset(
    {"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_NO_KILL", "SBATCH_OUTPUT", "SBATCH_WAIT"}
)
"""They would make several jobs of one run, take its output elsewhere, want input, keep a job that has lost a node, or
make sbatch wait for the end.
"""

_FILTERS = re.compile(
    r"(SQUEUE|SINFO|SACCT|SCANCEL)_(?!(ALL|FEDERATION|LOCAL|SIBLING)$)\w+|SLURM_(TIME_FORMAT|BITSTR_LEN)"
)
"""They leave jobs out of an answer, or write it otherwise; those that say where to look are left."""

_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_KEPT_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"})
"""How to reach Slurm: the variables that a child job needs, too (without SLURM_CONF nothing works on some clusters)."""


def environment_for(script: str) -> dict[str, str]:
    """Return the environment to submit a batch script with: nothing in it overrides what the script says."""
    return _without_overridden(child_environment(os.environ), script)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit with: inside a job, without what describes that job.

    Inherited SLURM_* variables would change the child (its nodes, its memory, its CPU binding).
    """
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or not name.startswith(("SLURM_", "SRUN_", "PMI_", "PMIX_"))
    }


def _without_overridden(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment without the variables that would override what a batch script says."""
    said = {variable for option in _DIRECTIVE.findall(script) for variable in _VARIABLES.get(option, ())}
    return {name: value for name, value in environment.items() if name not in said | _NEVER}


def without_filters(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that would change Slurm's answers or a command's choice of jobs."""
    return {name: value for name, value in environment.items() if not _FILTERS.fullmatch(name)}
