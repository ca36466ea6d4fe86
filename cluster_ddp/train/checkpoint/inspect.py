"""What checkpoints a run has, and in what state. No torch here: login nodes use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.record import read_record
from cluster_ddp.train.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointOfAnotherRun,
    CheckpointUnreadable,
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
    listed = [_look(directory, step, run_id, read_all) for step in steps_in(directory)]
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
    steps = [found for found in steps_in(directory) if step in (None, found)]
    passed_over: list[Listed] = []
    for candidate in reversed(steps):
        listed = _look(directory, candidate, run_id, read_all=True)
        if listed.manifest is not None and listed.state == "verified":
            return listed.path, listed.manifest, passed_over
        passed_over.append(listed)
    wanted = "" if step is None else f" of step {step}"
    if not passed_over:
        there = ", ".join(map(str, steps_in(directory))) or "none"
        raise NoSuchCheckpoint(f"no checkpoint{wanted} in {directory} (there are: {there})")
    found = "".join(f"\n  {listed.path.name}: {'; '.join(listed.problems)}" for listed in passed_over)
    raise CheckpointError(f"no sound checkpoint{wanted} in {directory}{found}")


def _look(directory: Path, step: int, run_id: str, read_all: bool) -> Listed:
    path = directory / step_name(step)
    try:
        manifest = verify(path, run_id) if read_all else open_checkpoint(path, run_id)
    except CheckpointDamaged as error:
        return Listed(path, "damaged", step, problems=tuple(error.problems))
    except CheckpointOfAnotherRun as error:
        return Listed(path, "other-run", step, problems=(error.problem,))
    except (OSError, CheckpointUnreadable) as error:
        return Listed(path, "unreadable", step, problems=(str(error),))
    return Listed(path, "verified" if read_all else "complete", step, manifest)
