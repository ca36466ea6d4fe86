"""The folders in ``<run>/checkpoints``: what their names mean, which checkpoints are kept, and removing leftovers.

Only complete checkpoints have names that begin with ``step-`` (run/directory.py). For others, the first word says what
they are: ``tmp-`` is being written or removed, ``replaced-`` was set aside for a newer save of the same step,
``damaged-`` was found damaged, ``abandoned-`` was saved by an attempt beyond the checkpoint that a newer one resumed
from. The first two name their owner, the process that works on them (host, pid, pid namespace, start time and boot),
which distinguishes the leftovers of a dead attempt from the work of a live one.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp.run.directory import MANIFEST, STEP_PATTERN, step_name, step_of
from cluster_ddp.run.liveness import identify, identity_name, is_alive, parse_identity
from cluster_ddp.run.storage import Storage

_DAMAGED, _ABANDONED = "damaged-", "abandoned-"  # before the name of a checkpoint's folder
_SET_ASIDE = re.compile(rf"({_DAMAGED}|{_ABANDONED}){STEP_PATTERN}.*")
_ABANDONED_STEP = re.compile(rf"{_ABANDONED}{STEP_PATTERN}(-.*)?")
_OWNED = re.compile(rf"(?P<kind>tmp|tmp-removed|replaced)-{STEP_PATTERN}~(?P<owner>[^~]*(?:~[^~]*){{4}})")
# A process on another machine cannot be looked up: its folder counts as abandoned once unchanged for this long.
_FOREIGN_AGE = 3600.0  # seconds


def this_process() -> str:
    """This process, in the form used for the owner in a folder's name."""
    return identity_name(identify(os.getpid()))


def temporary_name(step: int, owner: str) -> str:
    return f"tmp-{step_name(step)}~{owner}"


def removed_name(step: int, owner: str) -> str:
    return f"tmp-removed-{step_name(step)}~{owner}"


def replaced_name(step: int, owner: str) -> str:
    """The name of a checkpoint set aside while a newer save of its step takes its place."""
    return f"replaced-{step_name(step)}~{owner}"


def damaged_in(directory: Path) -> list[str]:
    """The names of the checkpoints that were set aside as damaged."""
    return sorted(name for name in _names_in(directory) if name.startswith(_DAMAGED))


def abandoned_in(directory: Path) -> dict[str, int]:
    """The names of the checkpoints that were set aside because they do not count, with their steps."""
    found = (_ABANDONED_STEP.fullmatch(name) for name in sorted(_names_in(directory)))
    return {match[0]: int(match["step"]) for match in found if match}


def set_aside_damaged(storage: Storage, directory: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that it is not mistaken for an intact one; returns its new path."""
    target = _free(directory / f"{_DAMAGED}{step_name(step)}-{time.strftime('%Y%m%d-%H%M%S')}")
    storage.rename(directory / step_name(step), target)
    storage.fsync_dir(directory)
    return target


def abandoned_path(directory: Path, step: int, attempt: int | None) -> Path:
    """A free name for a checkpoint saved by this attempt that does not count."""
    whose = "" if attempt is None else f"-attempt-{attempt:03d}"
    return _free(directory / f"{_ABANDONED}{step_name(step)}{whose}")


def _free(wanted: Path) -> Path:
    target, number = wanted, 1
    while target.exists():
        number += 1
        target = wanted.with_name(f"{wanted.name}-{number}")
    return target


def put_back_interrupted(storage: Storage, directory: Path, own: str) -> None:
    """Restore the names of checkpoints that were being replaced, or were being removed by a process that is gone.

    If an attempt that does not know of a newer one is still replacing a checkpoint, its rename then fails, because a
    folder cannot be renamed onto another.

    Parameters
    ----------
    own
        The caller as an owner. What the caller itself is removing is not restored.
    """
    for name, kind, step, owner in _owned_in(directory):
        if (directory / step_name(step)).exists() or kind == "tmp":
            continue
        interrupted = kind == "replaced" or (owner != own and not _may_live(directory / name, owner))
        if interrupted and _is_whole(directory / name):
            _put_back(storage, directory / name, step)


def put_back_removed(storage: Storage, directory: Path) -> bool:
    """Undo all removals, for a run that has nothing else left; returns whether there were any.

    A removal first renames a checkpoint and then checks whether a newer attempt may need it; the process may have been
    killed between the two.
    """
    removed = [
        (name, step)
        for name, kind, step, _ in _owned_in(directory)
        if kind == "tmp-removed" and _is_whole(directory / name) and not (directory / step_name(step)).exists()
    ]
    for name, step in removed:
        _put_back(storage, directory / name, step)
    return bool(removed)


def _put_back(storage: Storage, folder: Path, step: int) -> None:
    storage.rename(folder, folder.with_name(step_name(step)))
    storage.fsync_dir(folder.parent)


def _is_whole(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def remove_checkpoint(storage: Storage, folder: Path) -> None:
    """Remove a folder that no longer has its final name, manifest first: without one it is never restored.

    If it is a symbolic link, only the link is removed.
    """
    if stat.S_ISDIR(folder.lstat().st_mode) and _is_whole(folder):
        storage.unlink(folder / MANIFEST)
    storage.rmtree(folder)


def remove_leftovers(storage: Storage, directory: Path, own: str = "") -> dict[str, str]:
    """Remove the unfinished folders of processes that are gone; returns those that could not be removed, with reasons.

    A checkpoint set aside for a newer save of its step is removed only once the newer one exists. Of a symbolic link
    only the link is removed.

    Parameters
    ----------
    own
        The caller as an owner, if it has no save under way: its own leftovers are removed too.
    """
    refused = {}
    for name, kind, step, owner in _owned_in(directory):
        if kind == "replaced" and not (directory / step_name(step)).exists():
            continue
        if owner == own or not _may_live(directory / name, owner):
            try:
                remove_checkpoint(storage, directory / name)
            except OSError as error:
                refused[name] = error.strerror or str(error)
    return refused


def is_set_aside(name: str) -> bool:
    """Whether a folder of this name was a checkpoint that was found damaged, or abandoned."""
    return _SET_ASIDE.fullmatch(name) is not None


def unknown_names_in(directory: Path) -> list[str]:
    """Names that are not checkpoints, set aside or not: unfinished, being removed, or not this package's."""
    return sorted(
        name
        for name in _names_in(directory)
        if step_of(name) is None and not is_set_aside(name) and not name.startswith(".nfs")
    )


def best_step(steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]], name: str, mode: str) -> int | None:
    """The step with the best value of a metric (`mode`: ``min`` or ``max``), newest of equals; None if none has it."""
    sign = 1.0 if mode == "max" else -1.0
    rated = [(sign * metrics[step][name], step) for step in steps if name in metrics.get(step, {})]
    return max(rated)[1] if rated else None


def surplus(
    steps: Sequence[int],
    metrics: Mapping[int, Mapping[str, float]],
    *,
    newest_proven: int,
    keep_last: int,
    keep_every: int | None,
    best: tuple[str, str] | None,
) -> list[int]:
    """The steps whose checkpoints may be removed, oldest first.

    Parameters
    ----------
    newest_proven
        The step of the newest checkpoint that is known to be intact; it is always kept.
    best
        A metric and ``min`` or ``max``: the best checkpoint by that metric is kept, the newest of equals.
    """
    kept = {newest_proven, *sorted(steps)[-max(keep_last, 1) :]}
    if keep_every:
        kept |= {step for step in steps if step % keep_every == 0}
    if best is not None:
        kept.update(step for step in [best_step(steps, metrics, *best)] if step is not None)
    return [step for step in sorted(steps) if step not in kept]


def _names_in(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


def _owned_in(directory: Path) -> list[tuple[str, str, int, str]]:
    """Name, kind, step and owner of each folder that has an owner."""
    found = (_OWNED.fullmatch(name) for name in sorted(_names_in(directory)))
    return [(match[0], match["kind"], int(match["step"]), match["owner"]) for match in found if match]


def _may_live(folder: Path, owner: str) -> bool:
    process = parse_identity(owner)
    alive = is_alive(process) if process is not None else None
    if alive is not None:
        return alive
    try:
        entries = list(folder.iterdir()) if stat.S_ISDIR(folder.lstat().st_mode) else []
        newest = max(path.lstat().st_mtime for path in (folder, *entries))
    except OSError:
        return True
    return time.time() - newest < _FOREIGN_AGE
