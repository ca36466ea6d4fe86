"""Creates the submission for each way to use a batch system, that is each of `cluster_ddp.run.via.QUEUED`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster_ddp.run.via import SBATCH, SUBMITIT
from cluster_ddp.submit.base import Submission, SubmitError

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec


def _sbatch(spec: JobSpec, chain: int, after: tuple[str, ...]) -> Submission:
    from cluster_ddp.submit.sbatch import SbatchSubmission

    return SbatchSubmission(spec, chain=chain, after=after)


def _submitit(spec: JobSpec, chain: int, after: tuple[str, ...]) -> Submission:
    if chain > 1 or after:
        raise SubmitError("--chain and --after work with --via sbatch only.")
    from cluster_ddp.submit.submitit import SubmititSubmission

    return SubmititSubmission(spec)


_MAKE = {SBATCH: _sbatch, SUBMITIT: _submitit}


def submission(spec: JobSpec, via: str, *, chain: int = 1, after: tuple[str, ...] = ()) -> Submission:
    """Return the object that a dry run prints and a submission sends; raises `SubmitError` for an unknown way."""
    if via not in _MAKE:
        raise SubmitError(f"--via {via}: must be one of {', '.join(_MAKE)}.")
    return _MAKE[via](spec, chain, after)
