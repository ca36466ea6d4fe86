"""``cluster-ddp checkpoints``: what a run has saved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster_ddp import words
from cluster_ddp.cli.best import best_checkpoint
from cluster_ddp.cli.options import JsonList, Run
from cluster_ddp.cli.output import show, show_json
from cluster_ddp.cli.run_states import show_metrics
from cluster_ddp.exit_statuses import RUN_FAILED
from cluster_ddp.printing import one_line
from cluster_ddp.run.runs import find_run, runs_dir_of

if TYPE_CHECKING:
    from cluster_ddp.checkpoint.verify import CheckpointInfo


def command(
    run: Run,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte; exit with status 4 if a checkpoint is damaged or unreadable."),
    ] = False,
    as_json: JsonList = False,
) -> None:
    """List the checkpoints of a run, oldest first, and any problems with them."""
    from cluster_ddp.checkpoint.verify import list_checkpoints, run_id_of

    found = find_run(run, runs_dir_of(None))
    listed = list_checkpoints(found.checkpoints, run_id_of(found), read_all=verify)
    best = best_checkpoint(found, listed)
    if as_json:
        show_json([{**_row(info), "best": info.step == best} for info in listed])
    elif not listed:
        show(f"no checkpoints in {found.checkpoints}")
    else:
        _print(listed, best)
    if verify and any(info.state in ("damaged", "unreadable") for info in listed):
        raise typer.Exit(RUN_FAILED)


def _row(info: CheckpointInfo) -> dict[str, Any]:
    manifest = info.manifest
    return {
        "step": info.step,
        "state": info.state,
        "samples": manifest.samples if manifest else None,
        "epoch": manifest.epoch if manifest else None,
        "created": manifest.created if manifest else None,
        "bytes": manifest.size if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "metrics": manifest.metrics if manifest else {},
        "problems": list(info.problems),
        "directory": str(info.path),
    }


def _print(listed: list[CheckpointInfo], best: int | None) -> None:
    width = max(len(info.path.name) for info in listed)
    show(f"{'CHECKPOINT':<{width}}  {'STATE':<10}  {'CREATED':<19}  {'SIZE':>9}  {'SAMPLES':>12}  METRICS")
    for info in listed:
        if info.manifest is None:
            show(f"{info.path.name:<{width}}  {info.state:<10}  {one_line('; '.join(info.problems))}".rstrip())
            continue
        mark = "best  " if info.step == best else ""
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.manifest.created))
        show(
            f"{info.path.name:<{width}}  {info.state:<10}  {created}  {words.size(info.manifest.size):>9}  "
            f"{info.manifest.samples:>12,}  {mark}{show_metrics(info.manifest.metrics)}".rstrip()
        )
