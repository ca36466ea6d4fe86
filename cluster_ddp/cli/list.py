"""``cluster-ddp list``: the runs there are."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from cluster_ddp.cli.answer import tell
from cluster_ddp.cli.described import describe_runs
from cluster_ddp.run.directory import RunDirectory, list_runs, runs_dir_of
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.record import read_record
from cluster_ddp.run.state import RunStatus


def command(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """List the runs in the runs folder ($CLUSTER_DDP_RUNS, else ./runs), the oldest first."""
    runs_dir = runs_dir_of(None)
    runs = list_runs(runs_dir)
    rows = [_row(run, status) for run, status in zip(runs, describe_runs(runs), strict=True)]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        tell(f"no runs in {runs_dir} (CLUSTER_DDP_RUNS names another folder)")
    else:
        width = max(len(row["run_id"]) for row in rows)
        print(f"{'RUN':<{width}}  {'STATE':<9}  {'CREATED':<16}  {'VIA':<8}  ATTEMPTS  CHECKPOINT")
        for row in rows:
            checkpoint = "-" if row["last_checkpoint"] is None else row["last_checkpoint"]
            print(
                f"{row['run_id']:<{width}}  {row['state']:<9}  {_date(row['created']):<16}  {row['via'] or '-':<8}  "
                f"{row['attempts']:<8}  {checkpoint}"
            )


def _row(run: RunDirectory, status: RunStatus) -> dict[str, Any]:
    try:
        record = read_record(run)
    except RunError:
        record = None
    return {
        "run_id": status.run_id,
        "name": status.name,
        "state": status.state.value,
        "created": record.created if record else None,
        "via": record.via if record else None,
        "attempts": status.attempts,
        "last_checkpoint": status.last_checkpoint,
        "slurm_job_id": status.slurm_job_id,
        "directory": status.directory,
    }


def _date(created: float | None) -> str:
    return "-" if created is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
