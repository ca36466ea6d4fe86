"""The names of the folders of a run's checkpoints, and whose the unfinished ones are.

Only a complete checkpoint has a name that begins with ``step-``. The others say what they are in their first word:
``tmp-`` is being written or removed, ``replaced-`` was set aside for a newer save of the same step, ``damaged-`` was
found damaged. The first two name their owner, the process that works on them (host, pid, pid namespace, start time and
boot), which tells a left-over of a dead attempt from the work of a live one.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from cluster_ddp.run.liveness import ProcessIdentity, identify, is_alive
from cluster_ddp.run.storage import Storage

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,18})")
_OWNED = re.compile(r"(?P<kind>tmp|tmp-removed|replaced)-step-(?P<step>\d{8,18})~(?P<owner>[^~]*(?:~[^~]*){4})")
# A process on another machine cannot be looked up: what it left counts as dead when nothing in it changed for so long.
_FOREIGN_AGE = 3600.0  # seconds


def this_process() -> str:
    """This process as the owner in a folder's name."""
    me = identify(os.getpid())
    return "~".join((me.host, str(me.pid), me.namespace, me.started, me.boot_id))


def _process(owner: str) -> ProcessIdentity | None:
    host, pid, namespace, started, boot_id = owner.split("~")
    if not pid.isdecimal():
        return None
    return ProcessIdentity(host=host, pid=int(pid), boot_id=boot_id, namespace=namespace, started=started)


def step_name(step: int) -> str:
    """The name of the complete checkpoint of a step."""
    return f"step-{step:08d}"


def temporary_name(step: int, owner: str) -> str:
    """The name of a checkpoint that is being written."""
    return f"tmp-{step_name(step)}~{owner}"


def removed_name(step: int, owner: str) -> str:
    """The name of a checkpoint that is being removed."""
    return f"tmp-removed-{step_name(step)}~{owner}"


def replaced_name(step: int, owner: str) -> str:
    """The name of a checkpoint set aside while a newer save of its step takes its place."""
    return f"replaced-{step_name(step)}~{owner}"


def step_of(name: str) -> int | None:
    """The step of a complete checkpoint, or None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found.group(1)) if found and name == step_name(int(found.group(1))) else None


def steps_in(directory: Path) -> list[int]:
    """The steps of all complete checkpoints, ascending; empty when there is no such folder."""
    return sorted(step for name in _names_in(directory) if (step := step_of(name)) is not None)


def damaged_in(directory: Path) -> list[str]:
    """The names of the checkpoints that were set aside as damaged."""
    return sorted(name for name in _names_in(directory) if name.startswith("damaged-"))


def set_aside_damaged(storage: Storage, directory: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that nothing takes it for a sound one; returns its new place."""
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
    """Undo a replacement that was cut in two: the step that was set aside gets its name back. `own` as below."""
    for name, kind, step, owner in _owned_in(directory):
        if kind != "replaced" or (directory / step_name(step)).exists():
            continue
        if owner == own or not _may_live(directory / name, owner):
            storage.rename(directory / name, directory / step_name(step))
            storage.fsync_dir(directory)


def remove_left_overs(storage: Storage, directory: Path, own: str = "") -> None:
    """Remove the unfinished folders that nobody works on any more.

    A checkpoint that was set aside for a newer save of its step goes only when that newer one is there.

    Parameters
    ----------
    own
        The caller as an owner, when it has no save under way: what it left goes too.
    """
    for name, kind, step, owner in _owned_in(directory):
        if kind == "replaced" and not (directory / step_name(step)).exists():
            continue
        if owner == own or not _may_live(directory / name, owner):
            storage.rmtree(directory / name)


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
    process = _process(owner)
    alive = is_alive(process) if process is not None else None
    if alive is not None:
        return alive
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return True
    return time.time() - newest < _FOREIGN_AGE
