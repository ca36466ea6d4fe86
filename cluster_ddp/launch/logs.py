"""Reads log files: following one as it grows, its last lines, and all logs of an attempt."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.node_log import LogLine, parse_line
from cluster_ddp.run.reading import as_whole, open_regular, read_json_object

MAX_READ = 4 << 20
_MAX_LINE = 64 << 10
_END_OF_LINE = re.compile(rb"\r*\n|\r+(?!\Z)")
_TAIL_BYTES = 64 << 10  # a crashing Python lists its extension modules in a line of kilobytes
_TAIL_LINES = 40
_MIN_FREE = 4096
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it in front of each line of a traceback


class Tail:
    """Reads what is appended to a file, in whole lines; each state of a progress bar counts as a line.

    Attributes
    ----------
    offset
        How much of the file was read, in bytes.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._rest = b""

    def lines(self, *, rest: bool = False) -> list[str]:
        """Return the lines added since the last call, with `rest` also an unfinished one; empty if there is no file.

        Without `rest`, at most `MAX_READ` bytes are read.
        """
        new = self._read()
        *whole, self._rest = _END_OF_LINE.split(self._rest + new)
        while rest and new:
            new = self._read()
            *more, self._rest = _END_OF_LINE.split(self._rest + new)
            whole += more
        if self._rest and (rest or len(self._rest) > _MAX_LINE):
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def _read(self) -> bytes:
        try:
            fd, _ = open_regular(self.path)
            try:
                new = os.pread(fd, MAX_READ, self.offset)
            finally:
                os.close(fd)
        except OSError:
            return b""
        self.offset += len(new)
        return new


def last_lines(path: Path, count: int = _TAIL_LINES) -> list[str]:
    """Return the last lines of a log file, without empty ones."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_RANK_PREFIX.sub("", line) for line in text.splitlines() if line.strip()][-count:]


def if_disk_is_full() -> str:
    """Return what to add to an error on a node without space for what its ranks print; empty if it has some."""
    folder = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _MIN_FREE:
            return (
                f"; the node has no space left in {folder}, where what is printed is kept: make room there, or set "
                "TMPDIR to another folder"
            )
    return ""


_NODE_LOG = re.compile(r"node-(\d{1,6})(?:\.log)?")


class AttemptLogs:
    """Reads the logs of an attempt, repeatedly while it runs.

    Parameters
    ----------
    node
        The only node to read; None for all.
    """

    def __init__(self, attempt: AttemptDirectory, node: int | None = None) -> None:
        self._attempt = attempt
        self._node = node
        self._tails: dict[Path, tuple[int, LogLine | None, Tail]] = {}  # node, who prints it if the file says so, file

    def nodes(self) -> list[int]:
        """List all nodes that have a log, including those that are not read here."""
        try:
            names = [_NODE_LOG.fullmatch(path.name) for path in self._attempt.path.iterdir()]
        except OSError:
            return []
        return sorted({int(name[1]) for name in names if name})

    def lines(self, *, rest: bool = False) -> Iterator[tuple[int, LogLine]]:
        """Yield each new line since the last call, with its node; with `rest` also unfinished lines."""
        for node in self.nodes():
            if self._node in (None, node):
                self._find(node)
        for node, printer, tail in self._tails.values():
            while new := tail.lines() or (tail.lines(rest=True) if rest else []):  # in pieces, however long it is
                for text in new:
                    yield node, parse_line(text) if printer is None else replace(printer, text=text)

    def _find(self, node: int) -> None:
        self._add(node, self._attempt.log_file(node), None)
        folder = self._attempt.old_logs(node)
        if self._attempt.log_file(node) not in self._tails and folder.is_dir() and not folder.is_symlink():
            self._find_old(node, folder)

    def _find_old(self, node: int, folder: Path) -> None:
        """Find the files of an older version: one for each stream of each rank."""
        report = read_json_object(self._attempt.report_file(node)) or {}
        listed = report.get("ranks")
        ranks = {
            str(entry.get("local_rank")): as_whole(entry.get("rank"))
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, dict)
        }
        self._add(node, folder / "node.log", LogLine(""))
        self._add(node, folder / "agent.log", LogLine("", by_torchrun=True))
        for local in sorted(folder.glob("*/attempt_*/*")):
            rank = ranks.get(local.name)
            self._add(node, local / "stdout.log", LogLine("", rank))
            self._add(node, local / "stderr.log", LogLine("", rank, is_error=True))

    def _add(self, node: int, file: Path, printer: LogLine | None) -> None:
        if file not in self._tails and file.is_file():
            self._tails[file] = node, printer, Tail(file)
