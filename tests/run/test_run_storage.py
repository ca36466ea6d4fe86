from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.run.storage import Storage, replace_file, write_json

OLD, NEW = b"old content", b"new content, longer than the old" * 1000
OPERATIONS = ("open_write", "write", "fsync", "close", "rename", "unlink", "mkdir", "rmtree", "fsync_dir")


class Killed(BaseException):
    """The process is gone: nothing after it runs on the disk, not even clean-up."""


class DyingStorage(Storage):
    """Carries out the first `survives` operations and dies in the next one, before or after it took effect.

    Death leaves what was written but not flushed torn in half, as a machine that loses power does.
    """

    def __init__(self, survives: int, *, after: bool = False) -> None:
        self.left, self.after, self.dead = survives, after, False
        self.paths: dict[int, Path] = {}
        self.unflushed: dict[int, int] = {}

    def __getattribute__(self, name: str) -> Any:
        operation = super().__getattribute__(name)
        if name not in OPERATIONS:
            return operation

        def interposed(*arguments: Any) -> Any:
            if self.dead:
                raise Killed
            if self.left == 0 and not self.after:
                self.die()
            result = operation(*arguments)
            self.remember(name, arguments, result)
            if self.left == 0:
                self.die()
            self.left -= 1
            return result

        return interposed

    def remember(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open_write":
            self.paths[result] = arguments[0]
        elif name == "write":
            self.unflushed[arguments[0]] = len(arguments[1])
        elif name == "fsync":
            self.unflushed.pop(arguments[0], None)

    def die(self) -> None:
        self.dead = True
        for fd, size in self.unflushed.items():
            if self.paths[fd].exists():
                os.truncate(self.paths[fd], size // 2)
        raise Killed


def operations_of_a_replacement(path: Path) -> int:
    counting = DyingStorage(10**9)
    replace_file(counting, path, NEW)
    path.write_bytes(OLD)
    return 10**9 - counting.left


@pytest.mark.parametrize("after", [False, True])
def test_a_replacement_that_dies_anywhere_leaves_the_old_content_or_the_new(tmp_path: Path, after: bool) -> None:
    path = tmp_path / "file"
    count = operations_of_a_replacement(path)
    assert count == 6  # open, write, fsync, close, rename, fsync of the folder
    seen = []
    for survives in range(count):
        path.write_bytes(OLD)
        with pytest.raises(Killed):
            replace_file(DyingStorage(survives, after=after), path, NEW)
        assert path.read_bytes() in (OLD, NEW)
        seen.append(path.read_bytes() == NEW)
    old = 4 if after else 5  # of these it dies before the rename is done
    assert seen == [False] * old + [True] * (count - old)


@pytest.mark.parametrize("operation", ["open_write", "write", "fsync", "close", "rename"])
def test_a_replacement_that_fails_keeps_the_old_content_and_leaves_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    storage = Storage()

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, operation, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(storage, path, NEW)
    assert path.read_bytes() == OLD
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_data_and_folder_are_flushed_in_the_right_order(tmp_path: Path) -> None:
    done: list[str] = []

    class Noting(Storage):
        def __getattribute__(self, name: str) -> Any:
            if name in OPERATIONS:
                done.append(name)
            return super().__getattribute__(name)

    replace_file(Noting(), tmp_path / "file", NEW)
    assert done == ["open_write", "write", "fsync", "close", "rename", "fsync_dir"]


def test_write_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    replace_file(Storage(), tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW


def test_permissions_are_as_asked(tmp_path: Path) -> None:
    replace_file(Storage(), tmp_path / "script", b"#!/bin/bash\n", mode=0o700)
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o700
    write_json(Storage(), tmp_path / "value", {"a": [1, None]})
    assert (tmp_path / "value").read_text() == '{\n  "a": [\n    1,\n    null\n  ]\n}\n'


def test_advice_to_flush_changes_nothing_and_never_raises(tmp_path):
    storage = Storage()
    read_end, write_end = os.pipe()
    fd = storage.open_write(tmp_path / "file")
    try:
        storage.write(fd, b"abcdef")
        storage.begin_flush(fd, 0, 6)
        storage.begin_flush(fd, 1 << 40, 6)  # beyond the end
        storage.begin_flush(write_end, 0, 6)  # a pipe: the system refuses
        storage.fsync(fd)
    finally:
        for each in (fd, read_end, write_end):
            storage.close(each)
    assert (tmp_path / "file").read_bytes() == b"abcdef"
