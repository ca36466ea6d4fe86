"""Changing a small file that several machines change: only the holder of its lock replaces it.

The lock is a folder with one file in it, which names the holder and is also the draft of the new content.

- It is taken by renaming a new folder onto it, which works only while it is empty or does not exist.
- It is released, and the new content published, by one rename of the draft onto the file.
- It is taken away from a holder by removing the draft by its name, which affects no other holder's lock.

So no clocks need to agree, and a lock may be taken from a holder that is merely slow: its rename then finds no draft,
the file keeps the content written by others, and it starts over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from cluster_ddp.run.errors import RunError
from cluster_ddp.run.liveness import ProcessIdentity, identify, identity_name, is_alive, parse_identity
from cluster_ddp.run.storage import Storage, closing

LOCK_SECONDS = 30.0  # seconds that a change waits for the lock
SLOW_SECONDS = 5.0  # seconds after which the lock is taken from a holder, alive or not
_PAUSE = 0.01
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_LOST = (errno.ENOENT, errno.ESTALE)


class LockHeld(RunError):
    """A lock could not be taken."""


def change_file(storage: Storage, path: Path, change: Callable[[], bytes | None]) -> None:
    """Replace a file by the result of `change`, while nobody else changes it.

    Parameters
    ----------
    change
        Reads the file and returns its new content; None leaves the file as it is. Called again if the lock was lost
        meanwhile.

    Raises
    ------
    LockHeld
        Others held the lock all the time; the message names the holder, and since when.
    OSError
        The folder cannot be written.
    """
    lock = path.with_name(f".{path.name}.holder")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        draft, fd = _take(storage, lock, deadline)
        try:
            with closing(storage, fd):
                content = change()
                if content is None:
                    return
                storage.write(fd, content)
                storage.fsync(fd)
            storage.rename(draft, path)
            storage.fsync_dir(path.parent)
            return
        except OSError as error:
            if error.errno not in _LOST:
                raise
        finally:
            with contextlib.suppress(OSError):
                storage.unlink(draft)
            with contextlib.suppress(OSError):
                lock.rmdir()  # unless the next holder has it already


def _take(storage: Storage, lock: Path, deadline: float) -> tuple[Path, int]:
    """Wait for the lock and take it; return the draft inside it and a descriptor for writing it.

    The draft is opened before the lock is taken: opening it by name later could create it in a lock that by then
    belongs to somebody else.
    """
    name = f"{identity_name(identify(os.getpid()))}~{os.urandom(6).hex()}"
    own = lock.with_name(f"{lock.name}-{os.urandom(6).hex()}")
    storage.mkdir(own)
    fd = -1
    try:
        fd = storage.open_write(own / name)
        holder, since = "", time.monotonic()
        while True:
            try:
                storage.rename(own, lock)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            else:
                return lock / name, fd
            there = _holder(lock)
            if there != holder:
                holder, since = there, time.monotonic()
            if holder and (time.monotonic() - since > SLOW_SECONDS or _is_gone(holder)):
                with contextlib.suppress(OSError):
                    storage.unlink(lock / holder)
            if time.monotonic() > deadline:
                raise LockHeld(_held_by(lock, holder))
            time.sleep(_PAUSE)
    except BaseException:
        if fd >= 0:
            storage.close(fd)
        with contextlib.suppress(OSError):
            storage.rmtree(own)
        raise


def _holder(lock: Path) -> str:
    """Return the name of the draft in the lock; empty if nobody holds it."""
    try:
        return next(iter(os.listdir(lock)), "")
    except OSError:
        return ""


def _process(holder: str) -> ProcessIdentity | None:
    return parse_identity(holder.rpartition("~")[0])


def _is_gone(holder: str) -> bool:
    process = _process(holder)
    return process is not None and is_alive(process) is False


def _held_by(lock: Path, holder: str) -> str:
    process = _process(holder)
    who = f"process {process.pid} on {process.host}" if process is not None else "another process"
    try:
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime((lock / holder).lstat().st_mtime))
    except OSError:
        since = ""
    return f"{lock} is held by {who}{since}. If that process is gone, remove the folder and try again"
