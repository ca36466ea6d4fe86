"""What ``sweep`` and ``resume`` do with a sweep: start what is missing of it, and say what was started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cluster_ddp.cli.output import inform, print_json_line, remark, say_what_next
from cluster_ddp.cli.run_states import show_metrics
from cluster_ddp.exit_statuses import RUN_FAILED, RUN_STOPPED
from cluster_ddp.printing import one_line
from cluster_ddp.run.directory import LOCAL_OUTPUT
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.sweep import SweepDirectory, read_sweep
from cluster_ddp.run.via import LOCAL
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.sweep import Submitted, SweepPlan, planned_before, submit_sweep


def go_on(sweep: SweepDirectory, nodes: int | None, procs: int | None, *, as_json: bool) -> int:
    """Start what is missing, failed or stopped of a sweep, as it was last started; returns the exit status."""
    plan, record = planned_before(sweep), read_sweep(sweep)
    remark(plan.remarks)
    if record.via == LOCAL:
        return run_here(plan, record.at_once or 1, nodes, procs, None, as_json=as_json)
    if (nodes, procs) != (None, None):
        raise SubmitError("--nodes and --procs: all elements share one Slurm request; run the sweep command again")
    submit(plan, record.at_once, as_json=as_json)
    return 0


def submit(plan: SweepPlan, at_once: int | None, *, as_json: bool) -> None:
    """Submit what is missing, failed or stopped of a sweep, and say what was submitted."""
    submitted = submit_sweep(plan, at_once=at_once)
    _report(plan, submitted)
    if as_json:
        print_json_line(plan.sweep, submitted.job_ids[0] if submitted.job_ids else None, RunState.PENDING)


def run_here(
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
        print_json_line(plan.sweep, None, state)
    return exit_status


def _outcome(states: Iterable[RunState]) -> tuple[RunState, int]:
    """The state of a sweep that ran here, and the exit status that tells it."""
    if {RunState.FAILED, RunState.STALLED} & set(states):
        return RunState.FAILED, RUN_FAILED
    return (RunState.COMPLETED, 0) if set(states) == {RunState.COMPLETED} else (RunState.STOPPED, RUN_STOPPED)


def _report_element(status: RunStatus) -> None:
    reason = f"  ({one_line(status.reason)})" if status.reason else ""
    inform(f"{status.state.value:<9}  {one_line(status.run_id)}  {show_metrics(status.metrics)}{reason}".rstrip())


def _report(plan: SweepPlan, submitted: Submitted) -> None:
    """Say what was submitted, what was not and why, and what to do next."""
    sweep = plan.sweep
    jobs = f", Slurm job {', '.join(submitted.job_ids)}" if submitted.job_ids else ""
    others = Counter(status.state.value for status in submitted.found)
    left = sum(others.values()) - submitted.started
    inform(f"sweep {sweep.id}: {submitted.started} of {len(submitted.found)} elements submitted{jobs}")
    if left:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(others.items()))
        inform(f"  not submitted again: {left} (states before this call: {counts})")
    say_what_next(sweep.id, sweep.path)
