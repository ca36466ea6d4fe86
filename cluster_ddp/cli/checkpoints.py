"""``cluster-ddp checkpoints``: what a run has saved."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster_ddp.run.directory import find_run, runs_dir_of

if TYPE_CHECKING:
    from cluster_ddp.train.checkpoint.inspect import Listed


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, run id, or a unique prefix of one.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all bytes; exit status 4 if any are wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """List the checkpoints of a run, the oldest first, with what is wrong with them."""
    from cluster_ddp.train.checkpoint.inspect import list_checkpoints, owner_of

    found = find_run(run, runs_dir_of(None))
    listed = list_checkpoints(found.checkpoints, owner_of(found), read_all=verify)
    if as_json:
        print(json.dumps([_row(one) for one in listed], indent=2))
    elif not listed:
        print(f"no checkpoints in {found.checkpoints}")
    else:
        _print(listed)
    if verify and any(one.state in ("damaged", "unreadable") for one in listed):
        raise typer.Exit(4)


def _row(one: Listed) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "step": one.step,
        "state": one.state,
        "samples": manifest.samples if manifest else None,
        "epoch": manifest.epoch if manifest else None,
        "created": manifest.created if manifest else None,
        "bytes": manifest.size if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "metrics": manifest.metrics if manifest else {},
        "problems": list(one.problems),
        "directory": str(one.path),
    }


def _print(listed: list[Listed]) -> None:
    width = max(len(one.path.name) for one in listed)
    print(f"{'CHECKPOINT':<{width}}  {'STATE':<10}  {'CREATED':<19}  {'SIZE':>9}  {'SAMPLES':>12}  METRICS")
    for one in listed:
        if one.manifest is None:
            print(f"{one.path.name:<{width}}  {one.state:<10}  {'; '.join(one.problems)}".rstrip())
            continue
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.manifest.created))
        metrics = " ".join(f"{name}={value:.4g}" for name, value in one.manifest.metrics.items())
        print(
            f"{one.path.name:<{width}}  {one.state:<10}  {created}  {_size(one.manifest.size):>9}  "
            f"{one.manifest.samples:>12}  {metrics}".rstrip()
        )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
