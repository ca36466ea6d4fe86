"""Checks that all ranks of a run see one and the same run directory before training starts."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.ranks.distributed import World, all_gather_object, broadcast_object


def meet_in(directory: Path, world: World) -> str | None:
    """Create the run directory, and check that all ranks see what rank 0 puts there; all ranks must call it.

    Returns
    -------
    A warning if the ranks have different versions of torch, on all ranks; None if they have the same.

    Raises
    ------
    TrainError
        The directory cannot be created, or the ranks were given different folders, or a folder that is local to each
        host; raised on all ranks.
    """
    with _mark(directory) if world.is_main else contextlib.nullcontext() as mark:
        name, problem = broadcast_object(mark) or (None, None)
        sees = name is None or (directory / name).exists()
        found = all_gather_object((sees, platform.node(), str(directory), str(torch.__version__)))
    (_, host, place, version), *_ = found
    if problem is not None:
        raise TrainError(f"rank 0 on {host} cannot make the run directory {place}: {problem}")
    for rank, (sees, other_host, other_place, _) in enumerate(found):
        if not sees:
            raise TrainError(_not_shared(f"rank 0 on {host}", place, f"rank {rank} on {other_host}", other_place))
    differs = next((f"{other} on {other_host}" for _, other_host, _, other in found if other != version), None)
    if differs is None:
        return None
    return (
        f"the ranks have different versions of torch, {version} on {host} but {differs}: the results depend on which "
        "ranks are where. Install the same version on all hosts"
    )


@contextlib.contextmanager
def _mark(directory: Path) -> Iterator[tuple[str | None, str | None]]:
    """Yield a new file's name, and the error if the directory cannot be created; a full disk is reported later."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield None, str(error)
        return
    try:
        file = tempfile.NamedTemporaryFile(prefix=".ranks-", dir=directory)  # noqa: SIM115 (closed below)
    except OSError:
        yield None, None
        return
    with file:
        yield Path(file.name).name, None


def _not_shared(first: str, place: str, other: str, other_place: str) -> str:
    if place != other_place:
        return (
            f"the ranks have different run directories: {first} {place}, and {other} {other_place}. They write their "
            "checkpoints together: pass the same folder to join_run() on all ranks (tempfile.mkdtemp() makes one for "
            "each)"
        )
    return (
        f"{other} cannot see what {first} has put into the run directory {place}: the ranks write their checkpoints "
        "together, so it must be on storage that all hosts share. Set runs_dir, or the folder passed to join_run(), "
        "accordingly"
    )
