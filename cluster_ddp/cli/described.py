"""The states of runs for the commands: one call of squeue for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster_ddp.cli.answer import tell
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.state import RunStatus, SlurmJobLike, describe, slurm_job_ids
from cluster_ddp.slurm.commands import SlurmError, query_jobs

_PATIENCE = 20.0
"""Seconds that a person who asks waits for squeue; the run directories tell most of it without."""


def describe_runs(runs: Sequence[RunDirectory]) -> list[RunStatus]:
    """The state of each run, with Slurm's word where it can be had; where not, says so on standard error."""
    jobs = ask_slurm(runs)
    return [describe(run, jobs) for run in runs]


def ask_slurm(runs: Sequence[RunDirectory]) -> Mapping[str, SlurmJobLike] | None:
    """What squeue says about the jobs of all the runs; None when it cannot be asked."""
    job_ids = {job_id for run in runs for job_id in slurm_job_ids(run)}
    try:
        return query_jobs(job_ids, seconds=_PATIENCE) if job_ids else {}
    except SlurmError as error:
        first_line = str(error).splitlines()[0]
        tell(f"cluster-ddp: told from the run directories alone: {first_line}")
        return None
