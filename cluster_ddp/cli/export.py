"""``cluster-ddp export``: a run's weights as a plain safetensors file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster_ddp.run.directory import find_run, runs_dir_of
from cluster_ddp.run.errors import RunError


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, run id, or a unique prefix of one.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    step: Annotated[int | None, typer.Option("--step", help="Default: the newest sound checkpoint.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights (train.ema_decay).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the model's weights, verified, under the model's own names; safetensors.torch.load_file reads them."""
    from cluster_ddp.train.checkpoint.export import export_model
    from cluster_ddp.train.checkpoint.inspect import newest_sound, owner_of

    found = find_run(run, runs_dir_of(None))
    if not output.parent.is_dir():
        raise RunError(f"cannot write {output}: there is no folder {output.parent}")
    if output.exists() and not output.is_file():
        raise RunError(f"cannot write {output}: it is a folder or a device, not a file")
    if output.exists() and not force:
        raise RunError(f"{output} exists; --force replaces it")
    folder, manifest, passed_over = newest_sound(found.checkpoints, owner_of(found), step)
    for other in passed_over:
        print(f"passed over {other.path.name}: {'; '.join(other.problems)}", file=sys.stderr)
    count = export_model(folder, manifest, output, ema=ema)
    print(f"{output}: {count} tensors of step {manifest.step}")
