"""Every file operation that writes a run's data, one method each.

Tests put a `Storage` of their own in its place to interrupt a write at any operation, so nothing that writes to a run
may go past it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

# File systems that cannot flush a folder (some FUSE and NFS servers) answer with one of these; a rename is then as
# durable as it will get.
_FOLDER_FLUSH_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
_SYNC_FILE_RANGE_WRITE = 2


class Storage:
    """The real file system. Every method raises `OSError` as the system does."""

    def open_write(self, path: Path, mode: int = 0o644) -> int:
        """Create `path`, or empty it, and return a file descriptor for writing; `mode` is subject to the umask."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`, however many system calls that takes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(fd, rest) :]

    def begin_flush(self, fd: int, offset: int, length: int) -> None:
        """Let the disk begin with these bytes of a file while the next ones are prepared; `fsync` has less to wait for.

        Advice only: on a system or file system without it nothing happens, and what goes wrong is left to `fsync`.
        """
        call = _sync_file_range()
        if call is not None:
            call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        """Wait until what was written is durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close the descriptor; on network file systems this can report a failed write."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, replacing a file there in one step."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        """Make one folder; raises `FileExistsError` when it is there, on network file systems too."""
        path.mkdir(mode)

    def rmtree(self, path: Path) -> None:
        """Remove a folder and all in it."""
        shutil.rmtree(path)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a folder durable (creations, renames and removals)."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _FOLDER_FLUSH_UNSUPPORTED:
                raise
        finally:
            os.close(fd)


def replace_file(storage: Storage, path: Path, data: bytes, mode: int = 0o644) -> None:
    """Give `path` the content `data` in one step: a reader or a crash finds the old content or the new one.

    Parameters
    ----------
    storage
        Carries out each operation.
    path
        The file; its folder must exist.
    data
        The whole new content.
    mode
        Permissions of the new file, subject to the umask.

    Raises
    ------
    OSError
        As the file system reports it. The old content is then still there, or the new one is complete.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        fd = storage.open_write(temporary, mode)
        try:
            storage.write(fd, data)
            storage.fsync(fd)
        finally:
            storage.close(fd)
        storage.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            storage.unlink(temporary)
        raise
    storage.fsync_dir(path.parent)


def write_json(storage: Storage, path: Path, value: Any, mode: int = 0o644) -> None:
    """Replace `path` by the JSON form of `value`, indented, with a newline at the end."""
    replace_file(storage, path, (json.dumps(value, indent=2) + "\n").encode(), mode)


@functools.cache
def _sync_file_range() -> Any:
    """Linux's call of that name; None elsewhere."""
    import ctypes

    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
