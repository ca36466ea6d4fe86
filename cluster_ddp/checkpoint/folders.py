"""The folders in ``<run>/checkpoints``: what their names say, which checkpoints are kept, and what is left over.

Only a complete checkpoint has a name that begins with ``step-`` (run/directory.py). The others say what they are in
their first word: ``tmp-`` is being written or removed, ``replaced-`` was set aside for a newer save of the same step,
``damaged-`` was found damaged. The first two name their owner, the process that works on them (host, pid, pid
namespace, start time and boot), which distinguishes the leftovers of a dead attempt from the work of a live one.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp.run.directory import step_name, step_of
from cluster_ddp.run.liveness import identify, identity_name, is_alive, parse_identity
from cluster_ddp.run.storage import Storage

_OWNED = re.compile(r"(?P<kind>tmp|tmp-removed|replaced)-step-(?P<step>\d{8,18})~(?P<owner>[^~]*(?:~[^~]*){4})")
# A process on another machine cannot be looked up: what it left counts as dead when nothing in it changed for so long.
_FOREIGN_AGE = 3600.0  # seconds


def this_process() -> str:
    """This process as the owner in a folder's name."""
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
    return sorted(name for name in _names_in(directory) if name.startswith("damaged-"))


def set_aside_damaged(storage: Storage, directory: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for an intact one; returns its new path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = directory / f"damaged-{step_name(step)}-{stamp}"
    number = 1
    while target.exists():
        number += 1
        target = directory / f"damaged-{step_name(step)}-{stamp}-{number}"
    storage.rename(directory / step_name(step), target)
    storage.fsync_dir(directory)
    return target


def put_back_replaced(storage: Storage, directory: Path, own: str = "") -> None:
    """Undo a replacement that was interrupted: the checkpoint that was set aside gets its name back.

    Parameters
    ----------
    own
        The caller as an owner, when it has no save under way: what it set aside is put back too.
    """
    for name, kind, step, owner in _owned_in(directory):
        if kind != "replaced" or (directory / step_name(step)).exists():
            continue
        if owner == own or not _may_live(directory / name, owner):
            storage.rename(directory / name, directory / step_name(step))
            storage.fsync_dir(directory)


def remove_leftovers(storage: Storage, directory: Path, own: str = "") -> dict[str, str]:
    """Remove the unfinished folders that nobody works on any more; what stays against that, by name, and why.

    A checkpoint that was set aside for a newer save of its step is removed only once that newer one is there. Of a link
    only the link is removed.

    Parameters
    ----------
    own
        The caller as an owner, when it has no save under way: its own leftovers are removed too.
    """
    refused = {}
    for name, kind, step, owner in _owned_in(directory):
        if kind == "replaced" and not (directory / step_name(step)).exists():
            continue
        if owner == own or not _may_live(directory / name, owner):
            try:
                storage.rmtree(directory / name)
            except OSError as error:
                refused[name] = error.strerror or str(error)
    return refused


def strangers_in(directory: Path) -> list[str]:
    """The names of what is neither a checkpoint nor one that was set aside: unfinished, being removed, or not ours."""
    return sorted(
        name for name in _names_in(directory) if step_of(name) is None and not name.startswith(("damaged-", ".nfs"))
    )


def best_step(steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]], name: str, mode: str) -> int | None:
    """The step with the best value of a metric, the largest for ``max``, of equal ones the newest; None without any."""
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
        The name of a metric and ``min`` or ``max``: the best checkpoint by it is kept, the newer of two equal ones.
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
    """Name, kind, step and owner of each unfinished folder."""
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
