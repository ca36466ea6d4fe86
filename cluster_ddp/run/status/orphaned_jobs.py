"""Jobs in Slurm that no folder mentions because their submitter was killed before noting their ids.

Their comments name the run or sweep that they belong to, so they appear when squeue is asked about all jobs of this
user. That is done only if a submission was cut off, and then replaces the query by job ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cluster_ddp.run.jobs import KnownRun
from cluster_ddp.run.record import run_in_comment
from cluster_ddp.run.status.cache import EndedRun, Known
from cluster_ddp.run.status.sweep import NotBegun
from cluster_ddp.run.storage import is_mine_alone
from cluster_ddp.slurm.commands import query_jobs, query_own_jobs
from cluster_ddp.slurm.states import SlurmJob

K = TypeVar("K", bound=Known)


def ask_about(known: Iterable[Known], *, seconds: float) -> dict[str, SlurmJob]:
    """Query squeue once about the jobs of runs and elements, noted or not; raises `SlurmError` as `query_jobs` does.

    If a submission was cut off and some of the runs belong to other people, those take a second call.
    """
    known = list(known)
    if not any(isinstance(entry, KnownRun | NotBegun) and entry.orphaned for entry in known):
        return query_jobs({job_id for entry in known for job_id in entry.slurm_job_ids}, seconds=seconds)
    jobs = query_own_jobs(seconds=seconds)
    mine = {folder: is_mine_alone(folder) for folder in {_folder(entry) for entry in known}}
    others = {job_id for entry in known if not mine[_folder(entry)] for job_id in entry.slurm_job_ids}
    return {**query_jobs(others - jobs.keys(), seconds=seconds), **jobs}


def with_orphaned_jobs(known: Sequence[K], jobs: Mapping[str, SlurmJob]) -> list[K]:
    """Return the same runs and elements, each with the jobs that its folder does not mention."""
    by_name: dict[tuple[str | None, str], list[str]] = {}
    for job_id in dict.fromkeys(job.job_id for job in jobs.values()):
        by_name.setdefault((run_in_comment(jobs[job_id].comment), job_id.partition("_")[2]), []).append(job_id)
    return [_with_orphaned_jobs(entry, by_name) for entry in known]


def _with_orphaned_jobs(entry: K, by_name: Mapping[tuple[str | None, str], list[str]]) -> K:
    if isinstance(entry, EndedRun) or entry.orphaned is None:
        return entry
    task = "" if entry.orphaned.task is None else str(entry.orphaned.task)
    ids = (job_id for name in sorted(entry.orphaned.names) for job_id in by_name.get((name, task), ()))
    noted = {*entry.slurm_job_ids, *entry.orphaned.noted_arrays}
    return replace(entry, found=tuple(job_id for job_id in ids if noted.isdisjoint((job_id, job_id.partition("_")[0]))))


def _folder(entry: Known) -> Path:
    return entry.sweep.path if isinstance(entry, NotBegun) else entry.run.path
