"""Removes checkpoints of finished runs, for `cluster-ddp clean`; retention.py is what training removes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.checkpoint.folders import is_set_aside, remove_checkpoint, removed_name, this_process
from cluster_ddp.run.attempt_record import attempt_numbers
from cluster_ddp.run.directory import RunDirectory, step_of
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.storage import Storage


class HeavyFolder(NamedTuple):
    """A checkpoint folder, under its own name or set aside."""

    path: Path
    step: int | None  # None if it was set aside
    size: int  # bytes


def heavy_folders(run: RunDirectory, keep: Collection[int]) -> list[HeavyFolder]:
    """The checkpoints of steps other than `keep`, and those set aside; no symbolic links, and no unrelated files.

    Raises
    ------
    RunError
        A folder of the run is a symbolic link.
    """
    run.refuse_links()
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(run.checkpoints) as entries:
        for entry in entries:
            step = step_of(entry.name)
            wanted = step not in keep if step is not None else is_set_aside(entry.name)
            if wanted and entry.is_dir(follow_symlinks=False):
                found.append(HeavyFolder(Path(entry.path), step, _size(Path(entry.path))))
    return sorted(found)


def remove_folders(run: RunDirectory, folders: Iterable[HeavyFolder], attempts: Collection[int]) -> int:
    """Remove folders returned by `heavy_folders`; returns their size in bytes.

    As in retention.py, each is renamed first, and renamed back if an attempt has begun that may resume from it.

    Parameters
    ----------
    attempts
        The numbers of the attempts that existed when the run was found to be over.

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
                with contextlib.suppress(OSError):  # the new attempt has already restored it
                    storage.rename(target, folder.path)
        raise RunError(f"run {run.id} has started again meanwhile: none of its files were removed")
    for _, target in renamed:
        remove_checkpoint(storage, target)
    return sum(folder.size for folder, _ in renamed)


def _size(folder: Path) -> int:
    """Total bytes of the regular files in a folder; subfolders do not occur."""
    size = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            about = file.lstat()
            size += about.st_size if stat.S_ISREG(about.st_mode) else 0
    return size
