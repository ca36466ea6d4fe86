"""What the state of a run is determined from: its history and record, and what Slurm says about its jobs."""

from __future__ import annotations

from dataclasses import dataclass

from cluster_ddp.run.history import History
from cluster_ddp.run.record import RunRecord
from cluster_ddp.run.via import QUEUED, SBATCH
from cluster_ddp.slurm.states import SlurmJob


@dataclass(frozen=True)
class Facts:
    """What is known about a run.

    Attributes
    ----------
    record
        The run's identity; None if run.json cannot be read.
    job
        What Slurm says about the run's current or last job; None if it does not know one, or was not asked.
    answered
        Whether Slurm could be queried.
    job_ids
        All its Slurm jobs, in the order in which they were submitted.
    """

    history: History
    record: RunRecord | None
    job: SlurmJob | None
    answered: bool
    job_ids: list[str]

    @property
    def is_job_cancelled(self) -> bool:
        return self.job is not None and self.job.is_cancelled

    @property
    def next_of_chain(self) -> str | None:
        """The job that was queued behind the one of the last attempt; None if there is none."""
        last = self.history.last
        return self.history.next_of_chain(last.slurm_job_id, self.job_ids) if last is not None else None

    def how_the_job_ended(self) -> str:
        """Return that the job has ended, and in which state, with Slurm's reason if there is one."""
        assert self.job is not None
        reason = f" (Slurm: {self.job.reason})" if self.job.reason not in ("", "None") else ""
        return f"ended as {self.job.state}{reason}"

    def output_file(self, job_id: str) -> str:
        """Return the name of the file in the run directory that holds a job's output."""
        return QUEUED.get(self.record.via if self.record is not None else SBATCH, QUEUED[SBATCH]).format(job=job_id)

    def see_output(self, job_id: str) -> str:
        """Return where to find a job's output, in parentheses."""
        return f"(see {self.output_file(job_id)})"
