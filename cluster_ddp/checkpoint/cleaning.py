"""Removing the checkpoints of a run that is over, on request; for those that training removes, see retention.py."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.checkpoint.folders import remove_checkpoint, removed_name, this_process
from cluster_ddp.run.attempt_record import attempt_numbers
from cluster_ddp.run.directory import RunDirectory, step_of
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.storage import Storage

_SET_ASIDE = ("damaged-step-", "abandoned-step-")


class HeavyFolder(NamedTuple):
    """A checkpoint, or one that was set aside."""

    path: Path
    step: int | None  # None: it was set aside
    size: int  # bytes


def heavy_folders(run: RunDirectory, keep: Collection[int]) -> list[HeavyFolder]:
    """The checkpoints that are not of the steps to keep, and those set aside; no links, no other people's files.

    Raises
    ------
    RunError
        A link stands in place of a folder of the run.
    """
    run.refuse_links()
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(run.checkpoints) as entries:
        for entry in entries:
            step = step_of(entry.name)
            wanted = step not in keep if step is not None else entry.name.startswith(_SET_ASIDE)
            if wanted and entry.is_dir(follow_symlinks=False):
                found.append(HeavyFolder(Path(entry.path), step, _size(Path(entry.path))))
    return sorted(found)


def remove_folders(run: RunDirectory, folders: Iterable[HeavyFolder], attempts: Collection[int]) -> int:
    """Remove folders that `heavy_folders` has given; returns their bytes.

    As in retention.py each loses its name first, and gets it back when an attempt has begun that may go on from it.

    Parameters
    ----------
    attempts
        The numbers of the attempts that there were when the run was judged to be over.

    Raises
    ------
    RunError
        A new attempt has begun: nothing is removed.
    """
    run.refuse_links()
    storage, owner, renamed = Storage(), this_process(), []
    for folder in folders:
        target = folder.path
        if folder.step is not None:
            target = folder.path.with_name(removed_name(folder.step, owner))
            storage.rename(folder.path, target)
        renamed.append((folder, target))
    storage.fsync_dir(run.checkpoints)
    if set(attempt_numbers(run)) != set(attempts):
        for folder, target in renamed:
            if target != folder.path:
                with contextlib.suppress(OSError):  # the new attempt has put it back already
                    storage.rename(target, folder.path)
        raise RunError(f"run {run.id} has started again meanwhile: none of its files were removed")
    for _, target in renamed:
        remove_checkpoint(storage, target)
    return sum(folder.size for folder, _ in renamed)


def _size(folder: Path) -> int:
    """Bytes of the regular files in a folder, which has no folders below it."""
    size = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            about = file.lstat()
            size += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return size
