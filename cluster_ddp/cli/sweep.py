"""``cluster-ddp sweep``: one job in many variants."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster_ddp.cli.options import Job, JsonLine, NoCheck, Settings
from cluster_ddp.cli.output import inform, print_json_line, remark
from cluster_ddp.cli.run_states import show_metrics
from cluster_ddp.printing import one_line, printable
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status import RunStatus
from cluster_ddp.run.sweep import SweepDirectory, read_sweep
from cluster_ddp.run.via import LOCAL, LOCAL_OUTPUT
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.sbatch import SbatchSubmission
from cluster_ddp.submit.sweep import Submitted, SweepPlan, plan_again, plan_sweep, submit_sweep


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
    nodes: Annotated[int | None, typer.Option(min=1, help="With --local: nodes to simulate for each element.")] = None,
    procs: Annotated[int | None, typer.Option(min=1, help="With --local: ranks on each of them.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="With --local: devices, divided among the elements; none for CPUs.")
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
        raise typer.Exit(_run_here(plan, at_once or 1, nodes, procs, gpus, as_json=as_json))
    else:
        _submit(plan, at_once, as_json=as_json)


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


def go_on(sweep: SweepDirectory, nodes: int | None, procs: int | None, *, as_json: bool) -> int:
    """Start what is missing, failed or stopped of a sweep, as it was last started; returns the exit status."""
    plan, record = plan_again(sweep), read_sweep(sweep)
    remark(plan.remarks)
    if record.via == LOCAL:
        return _run_here(plan, record.at_once or 1, nodes, procs, None, as_json=as_json)
    if (nodes, procs) != (None, None):
        raise SubmitError("--nodes and --procs: all elements share one Slurm request; run the sweep command again")
    _submit(plan, record.at_once, as_json=as_json)
    return 0


def _submit(plan: SweepPlan, at_once: int | None, *, as_json: bool) -> None:
    submitted = submit_sweep(plan, at_once=at_once)
    _report(plan, submitted)
    if as_json:
        print_json_line(plan.sweep, submitted.job_ids[0] if submitted.job_ids else None, "PENDING")


def _run_here(
    plan: SweepPlan, at_once: int, nodes: int | None, procs: int | None, gpus: str | None, *, as_json: bool
) -> int:
    """Run a sweep in the foreground; returns the exit status."""
    from cluster_ddp.submit.sweep_here import run_sweep

    inform(
        f"sweep {plan.sweep.id}: the output of each element goes to its own folder: {plan.sweep.path}/*/{LOCAL_OUTPUT}"
    )
    found = run_sweep(plan, at_once=at_once, nodes=nodes, procs=procs, gpus=gpus, report=_report_element)
    states = Counter(status.state for status in found)
    inform(
        "  ".join(f"{count} {state.value}" for state, count in states.items()),
        f"  details    cluster-ddp status {one_line(str(plan.sweep.path))}",
    )
    state, exit_status = _outcome(states)
    if as_json:
        print_json_line(plan.sweep, None, state.value)
    return exit_status


def _outcome(states: Iterable[RunState]) -> tuple[RunState, int]:
    """Report how a sweep that ran here ended; returns the exit status."""
    if {RunState.FAILED, RunState.STALLED} & set(states):
        return RunState.FAILED, 4
    return (RunState.COMPLETED, 0) if set(states) == {RunState.COMPLETED} else (RunState.STOPPED, 5)


def _report_element(status: RunStatus) -> None:
    reason = f"  ({one_line(status.reason)})" if status.reason else ""
    inform(f"{status.state.value:<9}  {one_line(status.run_id)}  {show_metrics(status.metrics)}{reason}".rstrip())


def _show(plan: SweepPlan, at_once: int | None) -> None:
    """Print a dry run: the script alone on standard output, everything else on standard error."""
    from cluster_ddp.job.grid import labels

    sys.stdout.write(printable(plan.script.text) if sys.stdout.isatty() else plan.script.text)
    sys.stdout.flush()
    limit = f", {at_once} at once" if at_once is not None else ""
    names = labels(plan.elements)
    inform(
        "",
        "dry run: nothing was written or submitted",
        f"  sweep directory:  {plan.sweep.path}",
        f"  elements:         {len(names)}{limit}",
        *(
            f"    {number:04d}-{name}   {shlex.join(settings)}"
            for number, (name, settings) in enumerate(zip(names, plan.elements, strict=True))
        ),
    )


def _report(plan: SweepPlan, submitted: Submitted) -> None:
    """Say what was submitted, what was not and why, and what to do next."""
    sweep = plan.sweep
    jobs = f", Slurm job {', '.join(submitted.job_ids)}" if submitted.job_ids else ""
    others = Counter(status.state.value for status in submitted.found)
    left = sum(others.values()) - submitted.started
    inform(f"sweep {sweep.id}: {submitted.started} of {len(submitted.found)} elements submitted{jobs}")
    if left:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(others.items()))
        inform(f"  left alone: {left} (before this call: {counts})")
    inform(
        f"  directory:  {one_line(str(sweep.path))}",
        f"  watch:      cluster-ddp status {sweep.id} --watch",
        f"  end early:  cluster-ddp stop {sweep.id}   (for good: cancel)",
    )
