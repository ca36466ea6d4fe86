"""Submitting with sbatch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cluster_ddp.run.via import SBATCH
from cluster_ddp.slurm.commands import SlurmError, SubmissionUnclear, cancel_job, require, submit_script
from cluster_ddp.submit.refused import advised
from cluster_ddp.submit.script import BatchScript, check_before_sending, own_comment, render_script

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec
    from cluster_ddp.run.directory import RunDirectory


class SbatchSubmission:
    """A job as a batch script and the options that sbatch is called with.

    Parameters
    ----------
    chain
        How many jobs to queue one after the other for the same run; each continues where the previous one ended. For
        clusters that allow no requeue. Once the run is complete, the rest end immediately.
    after
        The ids of Slurm jobs that have to end first.
    """

    via = SBATCH
    to_slurm = True

    def __init__(self, spec: JobSpec, *, chain: int = 1, after: tuple[str, ...] = ()) -> None:
        self.script: BatchScript = render_script(spec, exported=os.environ)
        self.remarks = self.script.remarks
        self._comment = own_comment(spec)
        self._spec = spec
        self._chain = chain
        self._after = after

    @property
    def batch_script(self) -> str:
        return self.script.text

    def check(self) -> None:
        require("sbatch")
        check_before_sending(self._spec)

    def options(self, run: RunDirectory, after: tuple[str, ...]) -> list[str]:
        """Return the sbatch options that belong to a run and so cannot be in the script."""
        from cluster_ddp.run.record import slurm_comment  # not needed for a dry run

        # In sbatch's file patterns % begins a replacement.
        options = [
            f"--output={str(run.path).replace('%', '%%')}/slurm-%j.out",
            f"--comment={slurm_comment(run.id)}{self._comment}",
        ]
        if after:
            options.append(f"--dependency=afterany:{':'.join(after)}")
        return options

    def send(self, run: RunDirectory) -> str:
        """Call sbatch for each job of the chain, and note the jobs in the run's record; return the first one's id."""
        from cluster_ddp.run.record import add_slurm_job, announce_submission, update_record

        job_ids: list[str] = []
        after = self._after
        for _ in range(self._chain):
            announce_submission(run)
            try:
                with advised():
                    job_id = submit_script(run.script, str(run.path), options=self.options(run, after))
            except SlurmError as error:
                # Whether there is a job is determined later, and not while somebody seems to be submitting it.
                update_record(run, submitting={} if isinstance(error, SubmissionUnclear) else None)
                if job_ids:
                    _take_back(job_ids, error)
                raise
            add_slurm_job(run, job_id)
            job_ids.append(job_id)
            after = tuple(job_ids)  # all: the one before may be cancelled, or started too early, while another trains
        return job_ids[0]


def _take_back(job_ids: list[str], error: SlurmError) -> None:
    """Remove the first jobs of a chain from the queue if the next one was not queued."""
    try:
        cancel_job(*job_ids)
    except SlurmError as left:
        raise SubmissionUnclear(
            f"{error}\nThe chain's first jobs ({' '.join(job_ids)}) could not be taken back out of the queue: {left}"
        ) from error
