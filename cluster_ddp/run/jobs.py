"""The Slurm jobs of a run: those noted in its folder, those that certainly belong to it, and the current one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster_ddp.run.attempt_record import AttemptRecord, list_attempts, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.events import REQUEUED, SUBMITTED
from cluster_ddp.run.history import History
from cluster_ddp.run.record import (
    OrphanedJob,
    RunRecord,
    is_of_original,
    names_in_comments,
    orphaned_job,
    read_record,
    run_in_comment,
)
from cluster_ddp.run.storage import is_mine, owner_of
from cluster_ddp.slurm.states import ACTIVE, WAITING, SlurmJob


@dataclass(frozen=True)
class KnownRun:
    """What a run's folder says about its Slurm jobs, read before squeue is called once for many runs."""

    run: RunDirectory
    record: RunRecord | None  # None if run.json cannot be read
    unreadable: str | None  # why run.json cannot be read, or else that there is no job.yaml
    attempts: tuple[AttemptRecord, ...]
    orphaned: OrphanedJob | None = None  # set if the process that submitted it was killed, or got no clear answer
    withdrawn: tuple[str, ...] = ()  # the arrays of its sweep that `stop` or `cancel` took out of the queue
    found: tuple[str, ...] = ()  # the jobs that squeue shows for it: see `cluster_ddp.run.status.orphaned_jobs`

    @property
    def slurm_job_ids(self) -> list[str]:
        """Every Slurm job of the run."""
        noted = list(self.record.slurm_job_ids) if self.record else []
        begun = [attempt.slurm_job_id for attempt in self.attempts if attempt.slurm_job_id]
        return list(dict.fromkeys([*noted, *begun, *self.found]))

    def is_of_original(self, job_id: str) -> bool:
        """Whether the run is a copy, and that job one of its original's."""
        return self.record is not None and is_of_original(self.run, self.record, job_id)


def read_known(run: RunDirectory) -> KnownRun:
    """Read which Slurm jobs a run has, to query squeue for them."""
    attempts = tuple(read_attempt(attempt) for attempt in list_attempts(run))
    try:
        record = read_record(run)
    except RunError as error:
        return KnownRun(run, None, str(error), attempts)
    return KnownRun(run, record, run.job_file_problem(), attempts, orphaned_job(run, record))


def slurm_job_ids(run: RunDirectory) -> list[str]:
    """Return every Slurm job noted for a run."""
    return read_known(run).slurm_job_ids


def living_jobs(run: RunDirectory, slurm_jobs: Mapping[str, SlurmJob]) -> tuple[list[SlurmJob], list[SlurmJob]]:
    """Return the noted jobs that are queued or hold nodes: those that certainly belong to the run, and the others.

    A note in a folder proves nothing: somebody may have copied or written it. A job belongs to the run if its comment,
    which only its owner and Slurm's administrators can set, names the run.
    """
    known = read_known(run)
    names = names_in_comments(run, known.record)
    if not is_mine(run.record_file):
        names &= names_in_comments(run, None)
    jobs = [slurm_jobs[job_id]._replace(job_id=job_id) for job_id in known.slurm_job_ids if job_id in slurm_jobs]
    living = [job for job in jobs if job.state in ACTIVE | WAITING]
    own = [job for job in living if run_in_comment(job.comment) in names and not known.is_of_original(job.job_id)]
    return own, [job for job in living if job not in own]


def current_job(known: KnownRun, history: History, slurm_jobs: Mapping[str, SlurmJob]) -> SlurmJob | None:
    """Return the running one of the run's own jobs (a chain has several), else the next to start, else the latest.

    A job that a `stop` of its sweep took out of the queue does not count: nobody has cancelled the run.
    """
    noted = [job_id for job_id in known.slurm_job_ids if job_id in slurm_jobs and not known.is_of_original(job_id)]
    told = (slurm_jobs[job_id]._replace(job_id=job_id) for job_id in noted)
    jobs = [job for job in told if may_belong(job, history, known.record) and not _is_withdrawn(job, known)]
    for states in (ACTIVE, WAITING):
        for job in jobs:
            if job.state in states:
                return job
    return jobs[-1] if jobs else None


def _is_withdrawn(job: SlurmJob, known: KnownRun) -> bool:
    return job.is_cancelled and job.job_id.partition("_")[0] in known.withdrawn


def may_belong(job: SlurmJob, history: History, record: RunRecord | None) -> bool:
    """Whether a job may be the one that was noted for a run: Slurm may have reused its id.

    Our comment decides. A job that was submitted by hand has none, nor has any where the site replaces comments: then
    it must at least belong to the run's owner, and have the name that it was submitted with, unless it is certain that
    somebody has changed that.
    """
    named = run_in_comment(job.comment)
    if named is not None:
        return named in names_in_comments(history.run, record)
    owner = owner_of(history.run.record_file)
    if job.owner is not None and owner is not None and job.owner != owner:
        return False
    submitted = {str(event.get("slurm_job_id")) for event in history.events if event["event"] == SUBMITTED}
    named_alike = not job.name or record is None or job.job_id not in submitted or job.name == record.name
    return named_alike or _holds_last_attempt(job, history)


def _holds_last_attempt(job: SlurmJob, history: History) -> bool:
    """Whether the last attempt began while this job ran, whose id no other job had, or it waits to start once more."""
    last = history.last
    if last is None or job.job_id != last.slurm_job_id:
        return False
    if job.state in WAITING:
        return bool(history.of_attempt(last.number, REQUEUED))
    return job.state in ACTIVE and job.starts is not None and job.starts <= last.begun
