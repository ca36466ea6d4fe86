"""The exit statuses of the command line, and of the programs that run inside a job."""

from __future__ import annotations

WRONG_INPUT = 2
"""Something in the job file or on the command line is wrong."""

SLURM_FAILED = 3
"""Slurm refused, or is unreachable."""

RUN_FAILED = 4
"""The run failed, or what it needs is missing or damaged."""

RUN_STOPPED = 5
"""The run was stopped, and can be resumed."""

RUN_ALIVE = 75
"""A start of a job: another attempt of the run is alive."""

RUN_ENDED = 76
"""A start of a job: only a person may restart the run."""
