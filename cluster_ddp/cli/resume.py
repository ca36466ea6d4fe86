"""``cluster-ddp resume``: continue a run, in the same run directory."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from cluster_ddp.cli.options import JsonLine, RunOrSweep, Settings
from cluster_ddp.cli.output import inform, print_json_line, remark, report_submitted
from cluster_ddp.cli.run_states import SLURM_SECONDS, describe_runs, report_ended, say_if_copy
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.history import read_history
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import find_run_to_change, runs_dir_of
from cluster_ddp.run.sweep import find_sweep
from cluster_ddp.slurm.commands import SlurmError
from cluster_ddp.submit import local, resume
from cluster_ddp.submit.adopting import adopt_run_jobs


def command(
    run: RunOrSweep,
    settings: Settings = None,
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Nodes. Default: the last attempt's.")] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="Ranks per node. Default: the last attempt's.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="LIST", help="Of a local run: devices, such as 0,1; none for CPUs. Default: all."
        ),
    ] = None,
    as_json: JsonLine = False,
) -> None:
    """Continue a run or a sweep from its last checkpoint: in the queue, or on this machine if it is a local one."""
    sweep = find_sweep(run, runs_dir_of(None))
    if sweep is not None:
        from cluster_ddp.cli.sweep_start import go_on

        if settings:
            raise RunError(
                f"{sweep.id} is a sweep, and --set would make it a different one: run the sweep command again with "
                "it.\n"
                f"To change one of its runs, name its directory: cluster-ddp resume {sweep.path}/... --set ..."
            )
        if gpus is not None:
            raise RunError(f"{sweep.id} is a sweep, and --gpus is for single runs on this machine")
        raise typer.Exit(go_on(sweep, nodes, procs, as_json=as_json))
    found = find_run_to_change(run, runs_dir_of(None))
    with contextlib.suppress(SlurmError):  # looking up its state reports this
        adopt_run_jobs(found, seconds=SLURM_SECONDS)
    seen = read_history(found)  # read before the run is judged: what happens from here on is not forgiven
    (status,) = describe_runs([found])
    say_if_copy(found, status.record)
    plan = resume.plan_resume(found, seen, status, settings or (), nodes, procs, gpus)
    remark(plan.remarks)
    job_id, exit_status = None, 0
    if plan.start is None:
        script = plan.spec.script is not None
        more = (
            "its script different arguments: --set 'args=[...]'"
            if script
            else "it more: --set train.epochs=... (or train.steps)"
        )
        inform(f"run {found.id} is complete; to train further, give {more}")
        job_id, state = status.slurm_job_id, status.state
    elif isinstance(plan.start, local.LocalStart):
        status = resume.resume_here(plan, plan.start, show=sys.stderr if as_json else sys.stdout)
        state, exit_status = status.state, report_ended(found, status)
    else:
        job_id, state = resume.resubmit(plan, plan.start), RunState.PENDING
        report_submitted(found, job_id)
    if as_json:
        print_json_line(found, job_id, state)
    raise typer.Exit(exit_status)
