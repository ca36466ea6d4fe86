"""``cluster-ddp list``: all runs."""

from __future__ import annotations

from typing import Any

from cluster_ddp.cli.options import JsonList
from cluster_ddp.cli.output import say_no_runs, show, show_json
from cluster_ddp.cli.overview import Overview
from cluster_ddp.cli.run_states import ask_slurm, describe_with, sweep_lines
from cluster_ddp.printing import one_line
from cluster_ddp.run.runs import runs_dir_of
from cluster_ddp.run.status.report import RunSummary
from cluster_ddp.words import moment


def command(as_json: JsonList = False) -> None:
    """List the runs in $CLUSTER_DDP_RUNS, else the site file's runs_dir, else ./runs, oldest first."""
    runs_dir = runs_dir_of(None)
    overview = Overview(runs_dir)
    known = overview.read_known()
    found, sweeps = overview.divide(known, describe_with(known, ask_slurm(known), overview.summarize))
    if as_json:
        rows = [{**_row(sweep.as_run()), "elements": sweep.to_json()} for sweep in sweeps]
        show_json([*map(_row, found), *rows])
    elif not found and not sweeps:
        say_no_runs(runs_dir)
    else:
        _show_runs(found)
        show(*sweep_lines(sweeps))


def _show_runs(found: list[RunSummary]) -> None:
    if found:
        names = [one_line(status.run_id) for status in found]
        width = max(map(len, names), default=0)
        show(f"{'RUN':<{width}}  {'STATE':<9}  {'CREATED':<16}  {'VIA':<8}  ATTEMPTS  CHECKPOINT")
        for name, status in zip(names, found, strict=True):
            show(f"{name:<{width}}  {_cells(status)}".rstrip())


def _row(status: RunSummary) -> dict[str, Any]:
    return {
        "run_id": status.run_id,
        "name": status.name,
        "state": status.state.value,
        "created": status.record.created if status.record else None,
        "via": status.record.via if status.record else None,
        "attempts": status.attempts,
        "last_checkpoint": status.last_checkpoint,
        "slurm_job_id": status.slurm_job_id,
        "directory": status.directory,
    }


def _cells(status: RunSummary) -> str:
    """The cells after a run's name; for one that is damaged, how."""
    record = status.record
    created = moment(record.created) if record else "-"
    via = one_line(record.via) if record else "-"
    checkpoint = "-" if status.last_checkpoint is None else status.last_checkpoint
    cells = f"{status.state.value:<9}  {created:<16}  {via:<8}  {status.attempts:<8}  {checkpoint}"
    return f"{cells}  {one_line(status.reason or '')}" if status.is_damaged else cells
