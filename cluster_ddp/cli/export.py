"""``cluster-ddp export``: a run's weights as a plain safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster_ddp.cli.answer import tell
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
    from cluster_ddp.train.checkpoint.export import export_newest
    from cluster_ddp.train.checkpoint.inspect import owner_of

    found = find_run(run, runs_dir_of(None))
    if not output.parent.is_dir():
        raise RunError(f"cannot write {output}: there is no folder {output.parent}")
    if output.exists() and not output.is_file():
        raise RunError(f"cannot write {output}: it is a folder or a device, not a file")
    if output.exists() and not force:
        raise RunError(f"{output} exists; --force replaces it")
    count, manifest, passed_over = export_newest(found.checkpoints, owner_of(found), output, step=step, ema=ema)
    for other in passed_over:
        tell(f"passed over {other.path.name}: {'; '.join(other.problems)}")
    print(f"{output}: {count} tensors of step {manifest.step}")
