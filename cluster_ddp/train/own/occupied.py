"""Keeps two programs of one machine from training in the same folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.run.liveness import identify, identity_name, is_alive, parse_identity
from cluster_ddp.train.errors import TrainError

_OCCUPANT = ".joined-by-"


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Occupy a folder, in which another process would find this one's checkpoints, and resume from them.

    Raises
    ------
    TrainError
        Another process of this machine occupies it.
    """
    own = folder / f"{_OCCUPANT}{identity_name(identify(os.getpid()))}"
    try:
        with _one_at_a_time(folder):  # else two that begin at the same moment see, and refuse, each other
            with contextlib.suppress(OSError):
                own.touch()
            _refuse_others(folder, own)
        yield
    finally:
        with contextlib.suppress(OSError):
            own.unlink()


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a folder while the processes of this machine look who is in it, if its file system can."""
    with contextlib.ExitStack() as stack:
        # A folder that cannot be written is reported by the first save.
        with contextlib.suppress(OSError, ImportError):
            folder.mkdir(parents=True, exist_ok=True)
            import fcntl  # not on Windows, where this package is a library only

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)  # which unlocks it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _refuse_others(folder: Path, own: Path) -> None:
    for file in set(folder.glob(f"{_OCCUPANT}*")) - {own}:
        other = parse_identity(file.name.removeprefix(_OCCUPANT))
        is_there = other is None or is_alive(other)  # None: on another machine, so it may have been killed there
        if other is not None and is_there:
            raise TrainError(
                f"process {other.pid} trains in {folder} at the same time: each would resume from the other's "
                "checkpoints. Give each its own folder, join_run(folder), or wait until that process has ended"
            )
        if is_there is False:
            with contextlib.suppress(OSError):  # as if it belongs to somebody else
                file.unlink()
