"""``cluster-ddp sweep``: one job in many variants."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster_ddp.cli.options import Job, JsonLine, NoCheck, Settings
from cluster_ddp.cli.output import remark, show_dry_run
from cluster_ddp.cli.sweep_start import run_here, submit
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.sbatch import SbatchSubmission
from cluster_ddp.submit.sweep import SweepPlan, plan_sweep


def command(
    job: Job,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="A.B=V,V", help="Values of a setting: train.lr=1e-3,1e-4. If repeated, all combinations."),
    ] = None,
    list_file: Annotated[
        Path | None,
        typer.Option("--list", metavar="FILE", help="A YAML list of elements, such as - {train.lr: 1e-3}."),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="How many may run at the same time. Default: no limit; with --local: 1."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run it on this machine, without Slurm, in the foreground.")
    ] = False,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --local: nodes to simulate for each element.")
    ] = None,
    procs: Annotated[int | None, typer.Option(min=1, metavar="P", help="With --local: ranks on each of them.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="With --local: devices, divided among the elements; none for CPUs."),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script and the elements; write nothing.")
    ] = False,
    as_json: JsonLine = False,
    no_check: NoCheck = False,
) -> None:
    """Run a job once per combination of settings, as one Slurm array. Run again to start what is missing."""
    from cluster_ddp.job.grid import elements_of, read_list

    elements = elements_of(grid or (), read_list(list_file) if list_file else ())
    if not local and (nodes, procs, gpus) != (None, None, None):
        raise SubmitError("--nodes, --procs and --gpus need --local; for Slurm use --set slurm.nodes=... and so on")
    if no_check or dry_run or local:
        plan = plan_sweep(job, settings or (), elements, check_target=not no_check)
        remark(plan.remarks)
    else:
        plan = _plan_and_check(job, settings or (), elements)
    if dry_run:
        _show(plan, at_once)
    elif local:
        raise typer.Exit(run_here(plan, at_once or 1, nodes, procs, gpus, as_json=as_json))
    else:
        submit(plan, at_once, as_json=as_json)


def _plan_and_check(job: str, settings: Sequence[str], elements: Sequence[tuple[str, ...]]) -> SweepPlan:
    """Plan a sweep while the interpreter of its job imports torch, and check whether its elements can begin."""
    from cluster_ddp.submit.check_program import ProgramCheck
    from cluster_ddp.submit.preflight import check_before_queue

    with ProgramCheck() as program:
        plan = plan_sweep(job, settings, elements, check_target=True, at_first=program.begin)
        remark(plan.remarks)
        program.ask(plan.first, plan.specs)
        # The first stands for all: what is asked of Slurm, and the interpreter, cannot differ.
        check_before_queue(plan.first, SbatchSubmission(plan.spec), remark, program)
    return plan


def _show(plan: SweepPlan, at_once: int | None) -> None:
    from cluster_ddp.job.grid import labels

    limit = f", {at_once} at once" if at_once is not None else ""
    names = [f"{number:04d}-{name}" for number, name in enumerate(labels(plan.elements))]
    width = max(map(len, names))
    show_dry_run(
        plan.script.text,
        f"  sweep directory:  {plan.sweep.path}",
        f"  elements:         {len(names)}{limit}",
        *(f"    {name:<{width}}  {shlex.join(settings)}" for name, settings in zip(names, plan.elements, strict=True)),
    )
