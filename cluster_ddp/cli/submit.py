"""``cluster-ddp submit``: a job file into the queue."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_ddp.cli.answer import answer, remark, tell
from cluster_ddp.submit.base import Submission, SubmitError, start_run

if TYPE_CHECKING:
    from cluster_ddp.spec import JobSpec


class Via(str, Enum):
    """The batch system's front."""

    SBATCH = "sbatch"
    SUBMITIT = "submitit"


def command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or a template's name.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Lay a setting over the job file. Repeatable.")
    ] = None,
    via: Annotated[Via, typer.Option(help="Submit our own batch script, or through submitit.")] = Via.SBATCH,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script that would be sent; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")] = False,
    chain: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Queue N jobs, each going on where the one before ended.")
    ] = 1,
    after: Annotated[
        str | None, typer.Option(metavar="RUN", help="Start when the Slurm jobs of this run have ended.")
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not look whether the task or script exists.")
    ] = False,
) -> None:
    """Check a job, make its run directory, and put it into Slurm's queue."""
    from cluster_ddp.spec import load_job

    loaded = load_job(job, settings or (), check_target=not no_check)
    remark(loaded.warnings)
    submission = prepare(loaded.spec, via.value, chain=chain, after=_jobs_of(after) if after else ())
    remark(submission.remarks)
    if dry_run:
        _show(loaded.spec, submission)
        return
    run, job_id = start_run(loaded.spec, submission)
    report_submitted(run.id, str(run.path), job_id)
    if as_json:
        answer(run, job_id, "PENDING")


def prepare(spec: JobSpec, via: str, *, chain: int = 1, after: tuple[str, ...] = ()) -> Submission:
    """The object that a dry run prints and a submission sends.

    Raises
    ------
    SubmitError
        submitit was asked for what only sbatch can do.
    """
    if via == Via.SBATCH.value:
        from cluster_ddp.submit.sbatch import SbatchSubmission

        return SbatchSubmission(spec, chain=chain, after=after)
    if chain > 1 or after:
        raise SubmitError("--chain and --after work with --via sbatch only.")
    from cluster_ddp.submit.submitit import SubmititSubmission

    return SubmititSubmission(spec)


def report_submitted(run_id: str, directory: str, job_id: str | None) -> None:
    """Tell a person what was submitted and what to do next."""
    tell(
        f"run {run_id}" + (f", Slurm job {job_id}" if job_id else ""),
        f"  directory:  {directory}",
        f"  watch:      cluster-ddp status {run_id} --watch",
        f"  end early:  cluster-ddp stop {run_id}   (for good: cancel)",
    )


def _jobs_of(run: str) -> tuple[str, ...]:
    from cluster_ddp.run.directory import find_run, runs_dir_of
    from cluster_ddp.run.state import slurm_job_ids

    found = find_run(run, runs_dir_of(None))
    job_ids = slurm_job_ids(found)
    if not job_ids:
        raise SubmitError(f"--after: run {found.id} has no Slurm job to wait for.")
    return tuple(job_ids)


def _show(spec: JobSpec, submission: Submission) -> None:
    """Print a dry run: the script alone on standard output, everything else on standard error."""
    from cluster_ddp.network import resolve
    from cluster_ddp.run.directory import runs_dir_of

    sys.stdout.write(submission.text)
    sys.stdout.flush()
    network = resolve(spec.network)
    tell(
        "",
        "dry run: nothing was written or submitted",
        f"  run directory:  {runs_dir_of(spec)}/{spec.name}-<time>-<4 hex>",
        f"  ranks:          {spec.slurm.nodes} x {spec.procs_per_node} = {spec.world_size}",
        f"  network:        collectives may take {network.timeout} s",
        *(f"                  {setting.name}={setting.value}  ({setting.why})" for setting in network.settings),
    )
