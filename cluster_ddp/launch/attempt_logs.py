"""What the nodes and ranks of an attempt have printed, from the files in the run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cluster_ddp.launch.logs import Tail
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.node_log import LogLine, parse_line
from cluster_ddp.run.reading import as_whole, read_json_object

_NODE_LOG = re.compile(r"node-(\d{1,6})(?:\.log)?")


class AttemptLogs:
    """Reads the logs of an attempt, again and again while it goes on.

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
        """All nodes that have a log, including those that are not read here."""
        try:
            names = [_NODE_LOG.fullmatch(path.name) for path in self._attempt.path.iterdir()]
        except OSError:
            return []
        return sorted({int(name[1]) for name in names if name})

    def lines(self, *, rest: bool = False) -> Iterator[tuple[int, LogLine]]:
        """Each line that is new since the last call, with its node; with `rest` also lines that lack an end."""
        for node in self.nodes():
            if self._node in (None, node):
                self._find(node)
        for node, printer, tail in self._tails.values():
            while new := tail.lines() or (tail.lines(rest=True) if rest else []):  # a piece at a time, however long
                for text in new:
                    yield node, parse_line(text) if printer is None else replace(printer, text=text)

    def _find(self, node: int) -> None:
        self._add(node, self._attempt.log_file(node), None)
        folder = self._attempt.old_logs(node)
        if self._attempt.log_file(node) not in self._tails and folder.is_dir() and not folder.is_symlink():
            self._find_old(node, folder)

    def _find_old(self, node: int, folder: Path) -> None:
        """The files of an older version: one for each stream of each rank."""
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
