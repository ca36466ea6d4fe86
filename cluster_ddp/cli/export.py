"""``cluster-ddp export``: a run's weights as a plain safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster_ddp.cli.best import best_checkpoint
from cluster_ddp.cli.options import Run
from cluster_ddp.cli.output import inform, show
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.runs import find_run, runs_dir_of


def command(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="The checkpoint of this step. Default: the newest intact checkpoint."),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best one by checkpoint.keep_best of the job file.")] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="The averaged weights that evaluation uses (train.ema_decay).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the model's verified weights under the model's own names; safetensors.torch.load_file reads them."""
    from cluster_ddp.checkpoint.export import export_newest
    from cluster_ddp.checkpoint.verify import list_checkpoints, run_id_of

    found = find_run(run, runs_dir_of(None))
    if best:
        if step is not None:
            raise RunError("give either --step or --best, not both")
        step = best_checkpoint(found, list_checkpoints(found.checkpoints, run_id_of(found), read_all=False))
        if step is None:
            raise RunError("--best: checkpoint.keep_best is not set, or no checkpoint has its metric")
    if not output.parent.is_dir():
        raise RunError(f"cannot write {output}: there is no folder {output.parent}")
    if output.exists() and not output.is_file():
        raise RunError(f"cannot write {output}: it is a folder or a device, not a file")
    if output.exists() and not force:
        raise RunError(f"{output} exists; --force replaces it")
    count, manifest, passed_over = export_newest(found.checkpoints, run_id_of(found), output, step=step, ema=ema)
    for other in passed_over:
        inform(f"skipped {other.path.name}: {'; '.join(other.problems)}")
    show(f"{output}: {count} tensors of step {manifest.step}")
    if not ema and manifest.has_averages:
        inform("these are the trained weights; evaluation uses their moving average, which --ema exports")
