"""What checkpoints a run has, and in what state. No torch here: login nodes use it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.record import read_record
from cluster_ddp.train.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointOfAnotherRun,
    NoSuchCheckpoint,
)
from cluster_ddp.train.checkpoint.folders import damaged_in, step_name, steps_in
from cluster_ddp.train.checkpoint.manifest import Manifest
from cluster_ddp.train.checkpoint.verify import open_checkpoint, verify


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a run.

    Attributes
    ----------
    state
        ``complete`` (its files are there), ``verified`` (all bytes were read and are right), ``damaged``,
        ``unreadable`` (the storage refused), ``other-run`` (another run has saved it), or ``set-aside`` (was found
        damaged before, and renamed).
    problems
        By file, what is wrong.
    """

    path: Path
    state: str
    step: int | None = None
    manifest: Manifest | None = None
    problems: tuple[str, ...] = field(default_factory=tuple)


def owner_of(run: RunDirectory) -> str:
    """The run id in the checkpoints of a run: that of its record, for a person may have renamed the folder.

    The folder's name when there is no record to read: a script under a bare torchrun has none, and from a run that lost
    it the weights can still be rescued.
    """
    try:
        return read_record(run).id
    except RunError:
        return run.id


def list_checkpoints(directory: Path, run_id: str, *, read_all: bool = False) -> list[Listed]:
    """The checkpoints in ``<run>/checkpoints``, oldest first, then those that were set aside as damaged.

    Parameters
    ----------
    run_id
        The run that they must belong to.
    read_all
        Compare every byte with the checksums. Otherwise only the manifests and the sizes of the files are looked at.
    """
    looks = (_look(directory, step, run_id, read_all) for step in steps_in(directory))
    listed = [look for look in looks if look is not None]
    return listed + [Listed(directory / name, "set-aside") for name in damaged_in(directory)]


def newest_sound(directory: Path, run_id: str, step: int | None = None) -> tuple[Path, Manifest, list[Listed]]:
    """The newest checkpoint all of whose bytes are right, and those passed over for being damaged or another run's.

    Raises
    ------
    NoSuchCheckpoint
        None was saved, or none of `step`, when that is given.
    CheckpointError
        None of them is sound.
    """
    tried: set[int] = set()
    passed_over: list[Listed] = []
    while (candidate := _newest(directory, step, tried)) is not None:
        tried.add(candidate)
        listed = _look(directory, candidate, run_id, read_all=True)
        if listed is None:
            continue  # training has removed it meanwhile, for a newer one
        if listed.manifest is not None and listed.state == "verified":
            return listed.path, listed.manifest, passed_over
        passed_over.append(listed)
    wanted = "" if step is None else f" of step {step}"
    if not passed_over:
        there = ", ".join(map(str, steps_in(directory))) or "none"
        raise NoSuchCheckpoint(f"no checkpoint{wanted} in {directory} (there are: {there})")
    found = "".join(f"\n  {listed.path.name}: {'; '.join(listed.problems)}" for listed in passed_over)
    raise CheckpointError(f"no sound checkpoint{wanted} in {directory}{found}")


def _newest(directory: Path, step: int | None, tried: set[int]) -> int | None:
    """The newest step that is there now and has not been tried; only `step`, when that is given."""
    return max((one for one in steps_in(directory) if one not in tried and step in (None, one)), default=None)


def _look(directory: Path, step: int, run_id: str, read_all: bool) -> Listed | None:
    """One checkpoint; None when it has gone while it was looked at: training keeps as many as it is told to."""
    path = directory / step_name(step)
    try:
        manifest = verify(path, run_id) if read_all else open_checkpoint(path, run_id)
    except (OSError, CheckpointError) as error:
        return _bad(path, step, error) if os.path.lexists(path) else None
    return Listed(path, "verified" if read_all else "complete", step, manifest)


def _bad(path: Path, step: int, error: Exception) -> Listed:
    if isinstance(error, CheckpointDamaged):
        return Listed(path, "damaged", step, problems=tuple(error.problems))
    if isinstance(error, CheckpointOfAnotherRun):
        return Listed(path, "other-run", step, problems=(error.problem,))
    return Listed(path, "unreadable", step, problems=(str(error),))
