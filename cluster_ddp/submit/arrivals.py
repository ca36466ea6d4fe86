"""How nodes that people start one by one find each other before there is an attempt: by files in the run directory.

Each node that is started creates a file whose name contains its number, the number of nodes and the waiting process,
and touches it while it waits. Node 0 begins an attempt when all are there, and notes the arrivals in it. So a node
never joins an attempt that it was not started for, and a missing node costs no attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.sign_of_life import touched_at
from cluster_ddp.printing import one_line, say
from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunAlive, RunError
from cluster_ddp.run.liveness import ProcessIdentity, identify, identity_name, is_alive, parse_identity
from cluster_ddp.run.reading import as_whole, read_json_object
from cluster_ddp.run.storage import Storage, write_json

_NAME = re.compile(r"(\d{1,6})of(\d{1,6})x(\d{1,6})~([0-9a-f]{12})~(.+)")
_POLL_SECONDS = 0.5
_TOUCH_SECONDS = 2.0
_GONE_AFTER_SECONDS = 30.0  # network storage may show a touch late
_LATE_SECONDS = 60.0  # for which an attempt may be visible before its arrivals
_NAMES_SHOWN = 8


class NodesMissing(ClusterDDPError):
    """Not all nodes arrived in time."""

    exit_status = exit_statuses.RUN_FAILED


@dataclass(frozen=True)
class Arrival:
    """A node that waits for the others, as described by its file's name."""

    node: int
    nodes: int
    procs: int
    token: str
    process: ProcessIdentity

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.node}of{self.nodes}x{self.procs}~{self.token}~{identity_name(self.process)}"


def parse_arrival(name: str) -> Arrival | None:
    """Parse the name of an arrival file; None for any other name."""
    found = _NAME.fullmatch(name)
    process = parse_identity(found[5]) if found else None
    if found is None or process is None:
        return None
    return Arrival(int(found[1]), int(found[2]), int(found[3]), found[4], process)


@dataclass
class _Seen:
    """What was seen of another node's file: its first modification time, and when that last changed."""

    touched: int
    changed: float | None = None


@dataclass
class Meeting:
    """This node's part in the meeting: a context manager that makes the node's arrival file and removes it at the end.

    Raises
    ------
    RunError
        The run's folder cannot be written.
    """

    run: RunDirectory
    node: int
    nodes: int
    procs: int
    still_wanted: Callable[[], None]  # raises if the run must no longer begin
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _touched: float = 0.0
    _said: str = ""

    def __enter__(self) -> Meeting:
        token = os.urandom(6).hex()
        self._own = Arrival(self.node, self.nodes, self.procs, token, identify(os.getpid()))
        self._file = self.run.arrivals / self._own.name
        try:
            self.run.arrivals.mkdir(exist_ok=True)
            if self.run.arrivals.is_symlink():
                raise RunError(f"{self.run.arrivals} is a link, and nothing of a run is written through links")
            storage = Storage()
            storage.close(storage.open_write(self._file))
        except OSError as error:
            raise RunError(f"cannot write to {self.run.arrivals}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def all_there(self, patience: float) -> list[Arrival]:
        """Wait, as node 0, until every node has arrived; return the arrivals in the order of the nodes.

        Raises
        ------
        NodesMissing
            Some have not arrived in time.
        RunError
            A node was started for a different number of nodes or ranks.
        """
        deadline = time.monotonic() + patience
        while True:
            waiting = [self._own, *(arrival for arrival in self._others() if self._lives(arrival))]
            self._refuse_other_sizes(waiting)
            there = self._by_node(waiting)
            if all(len(starts) == 1 for starts in there.values()):
                return [starts[0] for starts in there.values()]
            self._wait_for(_what_is_missing(there, self.procs), deadline, patience)

    def attempt_begun(self, patience: float, *, after: int | None) -> tuple[AttemptDirectory, int]:
        """Wait, as any other node, until node 0 has begun an attempt with this node; return the attempt and its port.

        Parameters
        ----------
        after
            The last attempt when this node arrived; None if there was none.
        """
        deadline, seen_at = time.monotonic() + patience, None
        while True:
            newer = [attempt for attempt in list_attempts(self.run) if after is None or attempt.number > after]
            if newer:
                port = self._port_if_mine(newer[-1])
                if port is not None:
                    return newer[-1], port
                seen_at = seen_at or time.monotonic()
                if time.monotonic() - seen_at > _LATE_SECONDS:
                    raise RunAlive(
                        f"attempt {newer[-1].number} of run {self.run.id} has started without this start of node "
                        f"{self.node}: it was started twice or too late. See: cluster-ddp status {self.run.path}"
                    )
            others = self._others()
            self._refuse_other_sizes([arrival for arrival in others if arrival.node == 0 and self._lives(arrival)])
            missing = _what_is_missing(self._by_node([self._own, *others]), self.procs)
            self._wait_for(missing or "node 0 to begin", deadline, patience)

    def _by_node(self, arrivals: Sequence[Arrival]) -> dict[int, list[Arrival]]:
        return {node: [arrival for arrival in arrivals if arrival.node == node] for node in range(self.nodes)}

    def _port_if_mine(self, attempt: AttemptDirectory) -> int | None:
        noted = read_json_object(attempt.nodes_file) or {}
        tokens, port = noted.get("arrivals"), as_whole(noted.get("port"))
        mine = isinstance(tokens, list) and len(tokens) == self.nodes and tokens[self.node] == self._own.token
        return port if mine else None

    def _wait_for(self, missing: str, deadline: float, patience: float) -> None:
        now = time.monotonic()
        if now > deadline:
            raise NodesMissing(
                f"run {self.run.id}: not all {self.nodes} nodes joined within {patience:.0f} s (launch.join_timeout).\n"
                f"Missing: {missing}.\n"
                "Start the same command there, each with its own --node-rank (--print shows them all). If it is "
                f"running there already, check that that machine sees the same\n{self.run.path}: it must be on "
                "storage that all nodes share."
            )
        if missing != self._said:
            self._said = missing
            say(f"node {self.node} waits for {missing}")
        if now - self._touched > _TOUCH_SECONDS:
            self.still_wanted()
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self._file)
        time.sleep(_POLL_SECONDS)

    def _others(self) -> list[Arrival]:
        try:
            names = os.listdir(self.run.arrivals)
        except OSError:
            return []
        found = (parse_arrival(name) for name in names if name != self._own.name)
        return [arrival for arrival in found if arrival is not None]

    def _lives(self, arrival: Arrival) -> bool:
        """Whether a node still waits: on this machine by its process, elsewhere by whether its file keeps changing."""
        path = self.run.arrivals / arrival.name
        alive = is_alive(arrival.process)
        if alive is not None:
            if not alive:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            return alive
        touched = touched_at(path)
        if touched is None:
            return False
        seen = self._seen.setdefault(arrival.name, _Seen(touched))
        if touched != seen.touched:
            seen.touched, seen.changed = touched, time.monotonic()
        return seen.changed is not None and time.monotonic() - seen.changed < _GONE_AFTER_SECONDS

    def _refuse_other_sizes(self, waiting: Sequence[Arrival]) -> None:
        for arrival in waiting:
            if arrival.node >= self.nodes or (arrival.nodes, arrival.procs) != (self.nodes, self.procs):
                raise RunError(
                    f"node {arrival.node} (host {one_line(arrival.process.host)}) was started for {arrival.nodes} "
                    f"nodes of {arrival.procs} ranks, and node {self.node} here for {self.nodes} of {self.procs}.\n"
                    "Use the same --nnodes and --procs on all nodes"
                )


def note_arrivals(attempt: AttemptDirectory, arrivals: Sequence[Arrival], port: int) -> None:
    """Record in an attempt the arrivals that it began with, and the port where they meet."""
    write_json(Storage(), attempt.nodes_file, {"port": port, "arrivals": [arrival.token for arrival in arrivals]})


def _what_is_missing(there: dict[int, list[Arrival]], procs: int) -> str:
    """Name the nodes that are missing or arrived more than once, for people; empty if there are none."""
    missing = [node for node, starts in there.items() if not starts]
    said = [f"node {node} ({_ranks(node, procs)})" for node in missing[:_NAMES_SHOWN]]
    if len(missing) > _NAMES_SHOWN:
        said.append(f"{len(missing) - _NAMES_SHOWN} more nodes")
    for node, starts in there.items():
        if len(starts) > 1:
            hosts = " and ".join(one_line(arrival.process.host) for arrival in starts)
            said.append(f"one of the {len(starts)} starts of node {node} to end (on {hosts})")
    return ", ".join(said)


def _ranks(node: int, procs: int) -> str:
    first = node * procs
    return f"rank {first}" if procs == 1 else f"ranks {first} to {first + procs - 1}"
