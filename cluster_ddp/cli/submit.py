"""``cluster-ddp submit``: a job file into the queue."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_ddp.cli.options import Job, JsonLine, NoCheck, Settings
from cluster_ddp.cli.output import print_json_line, remark, report_submitted, show_dry_run
from cluster_ddp.printing import one_line
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.via import QUEUED, SBATCH
from cluster_ddp.submit.base import Submission, SubmitError, start_run
from cluster_ddp.submit.ways import submission

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, LoadedJob

_SHOWN = 60  # characters of a value


def command(
    job: Job,
    settings: Settings = None,
    via: Annotated[
        str,
        typer.Option(
            metavar=f"<{'|'.join(QUEUED)}>",
            autocompletion=lambda: list(QUEUED),
            help="Submit with sbatch and our own batch script, or through submitit.",
        ),
    ] = SBATCH,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script that would be submitted; write nothing.")
    ] = False,
    as_json: JsonLine = False,
    chain: Annotated[
        int,
        typer.Option(min=1, max=1000, metavar="N", help="Queue N jobs, each continuing where the one before ended."),
    ] = 1,
    after: Annotated[
        str | None, typer.Option(metavar="RUN", help="Start once the Slurm jobs of this run have ended.")
    ] = None,
    no_check: NoCheck = False,
) -> None:
    """Check a job, make its run directory, and put it into Slurm's queue."""
    from cluster_ddp.job import load_job

    loaded = load_job(job, settings or (), check_target=not no_check)
    remark(loaded.warnings)
    sending = submission(loaded.spec, via, chain=chain, after=_jobs_of(after) if after else ())
    remark(sending.remarks)
    if dry_run:
        _show(loaded, sending)
        return
    if not no_check:
        from cluster_ddp.submit.preflight import check_before_queue

        check_before_queue(loaded, sending, remark)
    run, job_id = start_run(loaded.spec, sending)
    report_submitted(run, job_id)
    if as_json:
        print_json_line(run, job_id, RunState.PENDING)


def _steps(spec: JobSpec) -> list[str]:
    from cluster_ddp.job import describe_training, plan_batch

    if spec.task is None:
        return []
    return [f"  training:       {describe_training(spec.train, plan_batch(spec.train, spec.world_size))}"]


def _jobs_of(run: str) -> tuple[str, ...]:
    from cluster_ddp.run.jobs import slurm_job_ids
    from cluster_ddp.run.runs import find_run, runs_dir_of

    found = find_run(run, runs_dir_of(None))
    job_ids = slurm_job_ids(found)
    if not job_ids:
        raise SubmitError(f"--after: run {found.id} has no Slurm job to wait for.")
    return tuple(job_ids)


def _show(loaded: LoadedJob, sending: Submission) -> None:
    from cluster_ddp.network import resolve
    from cluster_ddp.run.runs import runs_dir_of

    spec = loaded.spec
    network = resolve(spec.network, os.environ)
    show_dry_run(
        sending.batch_script,
        f"  run directory:  {runs_dir_of(spec)}/{spec.name}-<date>-<time>-<4 hex>",
        f"  ranks:          {spec.slurm.nodes} x {spec.procs_per_node} = {spec.world_size}",
        *_steps(spec),
        f"  network:        collectives time out after {network.timeout} s",
        *(f"                  {setting.name}={setting.value}  ({setting.why})" for setting in network.settings),
        "  where these values come from (all others are defaults, see docs/job-file.md):",
        *(f"    {origin.key}: {_short(origin.value)}   {origin.place}" for origin in loaded.origins),
    )


def _short(value: str) -> str:
    line = one_line(value)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
