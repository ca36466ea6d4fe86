"""A storage that fails or dies at a chosen operation, and knows what a disk would hold after the power went.

It works on a real folder and keeps a model of the disk beside it. A file's bytes are durable when the file was flushed,
a name (creation, renaming, removal) when its folder was. `after_crash` writes what would be found into another folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster_ddp.run.storage import Storage


class Killed(BaseException):
    """The process died here: not an `Exception`, so that nothing handles it."""


@dataclass
class _Node:
    folder: bool
    written: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    names: dict[str, _Node] = field(default_factory=dict)
    durable_names: dict[str, _Node] = field(default_factory=dict)


class CrashingStorage(Storage):
    """Counts its operations; at number `at` does what `fault` says: raise, keep raising, or kill.

    Parameters
    ----------
    at
        The operation that goes wrong, from 0; None: none does.
    fault
        ``once``: an OSError. ``always``: an OSError from there on. ``kill``: the end; a write is half done then.
    """

    def __init__(self, root: Path, at: int | None = None, fault: str = "kill") -> None:
        self.root, self.at, self.fault = root, at, fault
        self.operations: list[str] = []
        self._disk = _Node(folder=True)
        self._pending: list[tuple[_Node, dict[str, _Node | None]]] = []
        self._open: dict[int, _Node] = {}

    def open_write(self, path: Path, mode: int = 0o644) -> int:
        self._turn(f"open {path.name}")
        fd = super().open_write(path, mode)
        self._open[fd] = _Node(folder=False)
        self._name(path, self._open[fd])
        return fd

    def write(self, fd: int, data: bytes | bytearray | memoryview) -> None:
        self._turn("write", lambda: self._write(fd, bytes(data)[: len(data) // 2]))
        self._write(fd, bytes(data))

    def fsync(self, fd: int) -> None:
        self._turn("fsync")
        super().fsync(fd)
        self._open[fd].flushed = bytes(self._open[fd].written)

    def close(self, fd: int) -> None:
        self._turn("close")
        super().close(fd)
        del self._open[fd]

    def rename(self, source: Path, target: Path) -> None:
        self._turn(f"rename {source.name} {target.name}")
        assert source.parent == target.parent
        super().rename(source, target)
        folder = self._find(source.parent)
        self._change(folder, {source.name: None, target.name: folder.names[source.name]})

    def unlink(self, path: Path) -> None:
        self._turn(f"unlink {path.name}")
        super().unlink(path)
        self._change(self._find(path.parent), {path.name: None})

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        self._turn(f"mkdir {path.name}")
        super().mkdir(path, mode)
        self._name(path, _Node(folder=True))

    def rmtree(self, path: Path) -> None:
        for child in sorted(path.iterdir()):
            self.unlink(child)
        self._turn(f"rmdir {path.name}")
        path.rmdir()
        self._change(self._find(path.parent), {path.name: None})

    def fsync_dir(self, path: Path) -> None:
        self._turn(f"fsync_dir {path.name}")
        super().fsync_dir(path)
        folder = self._find(path)
        folder.durable_names = dict(folder.names)
        self._pending = [(other, change) for other, change in self._pending if other is not folder]

    def after_crash(self, target: Path, *, names_kept: float, bytes_kept: float, outer_lost: bool = False) -> None:
        """Write what the disk holds after a crash.

        Parameters
        ----------
        names_kept
            The share, from the oldest, of the changes of names that were not flushed but are there all the same.
        bytes_kept
            The share of the bytes that were not flushed but are there all the same; 0.5 tears them.
        outer_lost
            Of the changes of names, those of the folder of the checkpoints itself are lost, whatever their age: file
            systems keep the order within a folder, not between two.
        """
        found = _durable(self._disk)
        outer = self._disk.names.get("checkpoints") if outer_lost else None
        for folder, change in self._pending[: round(names_kept * len(self._pending))]:
            if folder is outer:
                continue
            for name, node in change.items():
                if node is None:
                    found[id(folder)].pop(name, None)
                else:
                    found.setdefault(id(folder), {})[name] = node
                    found.setdefault(id(node), dict(node.durable_names))
        _materialise(self._disk, target, found, bytes_kept)

    def _turn(self, operation: str, half: Callable[[], None] | None = None) -> None:
        number = len(self.operations)
        self.operations.append(operation)
        if self.at is None or number < self.at:
            return
        if self.fault == "kill":
            if half is not None and number == self.at:
                half()
            raise Killed(operation)
        if number == self.at or self.fault == "always":
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation)

    def _write(self, fd: int, data: bytes) -> None:
        super().write(fd, data)
        self._open[fd].written += data

    def _name(self, path: Path, node: _Node) -> None:
        self._change(self._find(path.parent), {path.name: node})

    def _change(self, folder: _Node, change: dict[str, _Node | None]) -> None:
        for name, node in change.items():
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self._pending.append((folder, change))

    def _find(self, path: Path) -> _Node:
        node = self._disk
        for part in path.relative_to(self.root).parts:
            node = node.names[part]
        return node


def _durable(root: _Node) -> dict[int, dict[str, _Node]]:
    """The flushed names of every folder that was ever reachable."""
    found: dict[int, dict[str, _Node]] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) not in found and node.folder:
            found[id(node)] = dict(node.durable_names)
            waiting += [*node.durable_names.values(), *node.names.values()]
    return found


def _materialise(node: _Node, target: Path, found: dict[int, dict[str, _Node]], bytes_kept: float) -> None:
    target.mkdir()
    for name, child in found.get(id(node), {}).items():
        if child.folder:
            _materialise(child, target / name, found, bytes_kept)
        else:
            lost = len(child.written) - len(child.flushed)
            (target / name).write_bytes(child.written[: len(child.flushed) + round(bytes_kept * lost)])
