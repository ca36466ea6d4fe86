"""The ways to submit a job. A new one is a module of this room with a `Submission` (base.py), and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster_ddp.submit.base import Submission, SubmitError

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

WAYS = ("sbatch", "submitit")


def submission(spec: JobSpec, via: str, *, chain: int = 1, after: tuple[str, ...] = ()) -> Submission:
    """The object that a dry run prints and a submission sends, by one of the `WAYS`."""
    if via == "sbatch":
        from cluster_ddp.submit.sbatch import SbatchSubmission

        return SbatchSubmission(spec, chain=chain, after=after)
    if chain > 1 or after:
        raise SubmitError("--chain and --after work with --via sbatch only.")
    from cluster_ddp.submit.submitit import SubmititSubmission

    return SubmititSubmission(spec)
