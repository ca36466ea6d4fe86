"""Every file operation by which a run's files are made, replaced and removed, one method each.

Tests substitute a `Storage` that interrupts a write at any operation, so everything that must be whole or absent
(records, job files, checkpoints) is written through this class only. Files of lines (events, metrics) are appended to
directly, with `open_lines`: a torn line costs only that line, and readers skip it. Logs are written by the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# File systems that cannot flush a folder (some FUSE and NFS servers) fail with one of these; a rename is then as
# durable as it can get.
_FOLDER_FLUSH_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
_SYNC_FILE_RANGE_WRITE = 2
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
PASSING_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN)
"""What storage may fail with, other than by being full, while its server fails over or restarts."""
_NOBODY = 65534  # the owner of files whose real owner the system or the storage does not reveal
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
"""For `os.open`: a link in place of the file is an error, because it may lead anywhere."""


class Storage:
    """The real file system. Every method raises `OSError` as the system does."""

    def open_write(self, path: Path, mode: int = 0o666) -> int:
        """Create or truncate `path`, never through a link, and return a file descriptor for writing.

        `mode` is subject to the umask.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | NO_LINK
        return os.open(path, flags, mode)

    def write(self, fd: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`, with as many system calls as it takes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            rest = rest[os.write(fd, rest) :]

    def begin_flush(self, fd: int, offset: int, length: int) -> None:
        """Have the disk begin to write these bytes of a file while the next are prepared; `fsync` then waits for less.

        Only a hint: it has no effect on a system or file system without it, and errors are left to `fsync`.
        """
        call = _sync_file_range()
        if call is not None:
            call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        """Wait until what was written is durable."""
        os.fsync(fd)

    def flush_lines(self, path: Path) -> None:
        """Wait until what was appended to a file of lines is durable, including its name."""
        fd = open_without_links(path, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self.fsync_dir(path.parent)

    def close(self, fd: int) -> None:
        """Close the descriptor; on network file systems this can report a failed write."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target`, replacing a file there in one step."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        """Make one folder; raises `FileExistsError` if it exists, on network file systems too."""
        path.mkdir(mode)

    def rmtree(self, path: Path) -> None:
        """Remove a folder and everything in it; a link, or a file at that path, is itself removed."""
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()

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


@contextlib.contextmanager
def created(storage: Storage, path: Path, mode: int = 0o666) -> Iterator[int]:
    """Yield a file descriptor for writing a new file; flush the file at the end, and close it in any case."""
    fd = storage.open_write(path, mode)
    with closing(storage, fd):
        yield fd
        storage.fsync(fd)


@contextlib.contextmanager
def closing(storage: Storage, fd: int) -> Iterator[None]:
    """Close a descriptor at the end; an earlier error takes precedence over one from closing."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            storage.close(fd)
        raise
    storage.close(fd)


@contextlib.contextmanager
def replaced(storage: Storage, path: Path, mode: int = 0o666) -> Iterator[int]:
    """Yield a file descriptor for the new content of `path`, which replaces the old in one step when the block ends.

    A reader, or a crash, finds either the old content or the new. The folder must exist; `mode` is subject to the
    umask.

    Raises
    ------
    OSError
        As reported by the file system. Then the old content is still there, or the new one is complete.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with created(storage, temporary, mode) as fd:
            yield fd
        storage.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            storage.unlink(temporary)
        raise
    storage.fsync_dir(path.parent)


def replace_file(storage: Storage, path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the content of `path` by `data` in one step; see `replaced`."""
    with replaced(storage, path, mode) as fd:
        storage.write(fd, data)


def write_json(storage: Storage, path: Path, value: Any) -> None:
    """Replace `path` by the JSON form of `value`, indented, with a newline at the end."""
    replace_file(storage, path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return the JSON form of `value`, indented, with a newline at the end."""
    return (json.dumps(value, indent=2) + "\n").encode()


def is_mine(path: Path) -> bool:
    """Whether the path exists and belongs to the caller."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def owner_of(path: Path) -> int | None:
    """Return the id of the user that a path belongs to; None if storage maps users to nobody."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return None if owner == _NOBODY else owner


def is_mine_alone(folder: Path) -> bool:
    """Whether a folder belongs to the caller and nobody else may write to it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_append(path: Path) -> int:
    """Open a regular file for reading and appending, created if missing; see `open_without_links`."""
    return open_without_links(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def open_without_links(path: Path, flags: int) -> int:
    """Open a regular file; raises `OSError` for a link, which may lead anywhere, a named pipe, a device or a folder."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | NO_LINK | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, and links are not followed here", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return fd


def open_lines(path: Path) -> tuple[int, bytes]:
    """Open a file of lines for appending, created if missing; return its descriptor, and what to write first.

    The latter is a line break if a killed process left a torn line, which would otherwise spoil the next one.
    """
    fd = open_append(path)
    try:
        size = os.fstat(fd).st_size
        return fd, b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""
    except OSError:
        os.close(fd)
        raise


@functools.cache
def _sync_file_range() -> Any:
    """Return Linux's function of that name; None elsewhere."""
    import ctypes

    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
