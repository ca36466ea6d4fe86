"""What a shell has set for Slurm's commands (``SBATCH_PARTITION``, ``SQUEUE_PARTITION`` and the like).

To sbatch its variables beat the ``#SBATCH`` lines of a script. Here a job gets what it asks for, whatever the shell
holds; a variable counts only where the script has no such line. And the commands that ask about a job or end it show,
and end, what they are asked for.
"""

from __future__ import annotations

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

_NEVER = frozenset({"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_OUTPUT", "SBATCH_WAIT"})
"""They would make several jobs of one run, take its output elsewhere, want input, or make sbatch wait for the end."""

_FOR_THE_EYE = re.compile(
    r"(SQUEUE|SINFO|SACCT|SCANCEL)_(?!(ALL|FEDERATION|LOCAL|SIBLING)$)\w+|SLURM_(TIME_FORMAT|BITSTR_LEN)"
)
"""They leave jobs out of an answer, or write it otherwise; those that say where to look are left."""

_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)


def without_overridden(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """The environment without the variables that would override what a batch script says."""
    said = {variable for option in _DIRECTIVE.findall(script) for variable in _VARIABLES.get(option, ())}
    return {name: value for name, value in environment.items() if name not in said | _NEVER}


def without_filters(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that would change what Slurm answers, or which jobs a command is for."""
    return {name: value for name, value in environment.items() if not _FOR_THE_EYE.fullmatch(name)}
