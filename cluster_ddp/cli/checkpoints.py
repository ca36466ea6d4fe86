"""``cluster-ddp checkpoints``: what a run has saved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster_ddp.cli.options import JsonList, Run
from cluster_ddp.cli.output import show, show_json
from cluster_ddp.cli.run_states import show_metrics
from cluster_ddp.printing import one_line
from cluster_ddp.run.directory import RunDirectory
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
    best = best_of(found, listed)
    if as_json:
        show_json([{**_row(info), "best": info.step == best} for info in listed])
    elif not listed:
        show(f"no checkpoints in {found.checkpoints}")
    else:
        _print(listed, best)
    if verify and any(info.state in ("damaged", "unreadable") for info in listed):
        raise typer.Exit(4)


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


def best_of(run: RunDirectory, listed: list[CheckpointInfo]) -> int | None:
    """The step of the best checkpoint by ``checkpoint.keep_best``; None where that is not set, or it has no metric."""
    from cluster_ddp.checkpoint.folders import best_step
    from cluster_ddp.job import ClusterDDPError, load_resolved

    try:
        wanted = load_resolved(run.job_file).checkpoint.keep_best
    except ClusterDDPError:
        return None
    if wanted is None:
        return None
    metrics = {info.manifest.step: info.manifest.metrics for info in listed if info.manifest is not None}
    return best_step(list(metrics), metrics, wanted.metric, wanted.mode)


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
            f"{info.path.name:<{width}}  {info.state:<10}  {created}  {size_in_words(info.manifest.size):>9}  "
            f"{info.manifest.samples:>12,}  {mark}{show_metrics(info.manifest.metrics)}".rstrip()
        )


def size_in_words(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
