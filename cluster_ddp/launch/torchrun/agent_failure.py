"""Explains why a node could not take part: what its system or torchrun said, and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster_ddp.launch.logs import last_lines
from cluster_ddp.launch.variables import OPEN_FILES_VARIABLE
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.reading import read_json_object

_MEETING = "meeting.json"
_MAX_WORDS = 400
_SHARED = "must be the same and writable on every node (runs_dir)"
_LOG_LINES = 200
_ERROR = re.compile(r"^(?:\[\S+\]: ?)?(?P<error>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*)")
# torchrun's own summaries of an error that is printed above them.
_SUMMARY = re.compile(r"^(?:\w+\.)*(ChildFailedError|RendezvousConnectionError)")
TOO_MANY_FILES = re.compile(r"Too many open files(?! in system)")
MORE_FILES = "raise the limit in a line of launch.setup (ulimit -n 4096), or have it raised"


@dataclass(frozen=True)
class Meeting:
    """How the meeting of the agents failed. The agent records it, as its log is meant for people."""

    came: tuple[str, ...] = ()  # the hosts whose agents met in time, if others did not
    too_few: bool = False  # whether the agent met too few others, and would have trained in a smaller world

    def record(self, log_dir: Path) -> None:
        """Write it to the agent's log folder, for the node program."""
        with contextlib.suppress(OSError):
            (log_dir / _MEETING).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, log_dir: Path) -> Meeting:
        """Read what the agent has recorded; by default, nothing has failed."""
        found = read_json_object(log_dir / _MEETING) or {}
        came = found.get("came")
        return cls(tuple(map(str, came)) if isinstance(came, list) else (), found.get("too_few") is True)


@dataclass(frozen=True)
class AgentFailure:
    """Why torchrun's agent gave up."""

    error: str  # for people, with the remedy if known
    suspect: bool  # whether the node itself may be at fault, so that a different one should be tried
    came: frozenset[str] = frozenset()  # the hosts whose agents met in time, if others did not; empty if unknown


def agent_failure(log: Path, status: int | None, endpoint: str, join_timeout: float) -> AgentFailure:
    """Find the reason at the end of an agent's log."""
    lines, meeting = last_lines(log, _LOG_LINES), Meeting.read(log.parent)
    words, own = _last_error(lines)
    host, _, port = endpoint.rpartition(":")
    everything = "\n".join(lines)
    if re.search(r"EADDRINUSE|address already in use", everything, re.IGNORECASE):
        return AgentFailure(
            f"port {port} is in use on this node; another is tried at the next attempt, unless launch.port fixes it",
            suspect=True,
        )
    if re.search(r"gai ?error|name resolution|could not be resolved", everything):
        return AgentFailure(
            f"the address of the first node, {host}, does not resolve here: {words}; see its /etc/hosts and DNS",
            suspect=True,
        )
    if TOO_MANY_FILES.search(words):
        return AgentFailure(
            f"torchrun gave up before starting any ranks: {words}; {MORE_FILES}", node_allows_fewer_files()
        )
    if re.search(r"RendezvousTimeoutError|waiting for clients|client socket has timed out", everything):
        return AgentFailure(
            f"not all nodes reached {endpoint} within {join_timeout:.0f} s (launch.join_timeout): {words}; if no "
            f"missing node is named, check that {host} is the first node's address, that the firewall lets the nodes "
            f"reach port {port} there, and that network.socket_ifname is the interface that joins them",
            suspect=False,
            came=frozenset(meeting.came),
        )
    if meeting.too_few:
        return AgentFailure(f"{words}; the others went on without this node, or have failed", suspect=False)
    if status is not None and status < 0 and not own:
        return AgentFailure(f"torchrun was killed by signal {-status} before starting any ranks", suspect=True)
    return AgentFailure(f"torchrun gave up before starting any ranks: {words or 'its log is empty'}", suspect=True)


def lost_connection(log: Path, endpoint: str) -> str:
    """Say why an agent gave up although no rank had failed: only its connection to the others keeps it going."""
    words, _ = _last_error(last_lines(log, _LOG_LINES))
    said = words or "its log is empty"
    return f"torchrun gave up, and its ranks with it: {said}; the network between it and {endpoint} may have failed"


def _last_error(lines: list[str]) -> tuple[str, bool]:
    """Return the last error in an agent's log, and whether it is more than a summary of others."""
    errors = [found["error"] for line in lines if (found := _ERROR.match(line))]
    own = [error for error in errors if not _SUMMARY.match(error)]
    return ((own or errors or lines or [""])[-1])[:_MAX_WORDS], bool(own)


def explain(error: Exception, run: RunDirectory) -> str:
    """Say why a node program could not begin, and what to do."""
    if not run.exists():
        return f"{run.path} is not there; the runs folder {_SHARED}"
    if not isinstance(error, OSError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if str(error.filename or "").startswith("/dev/shm"):  # which TMPDIR does not replace
            return f"{error}; free some space there: files left by other jobs use the node's memory"
        return f"{error}; make room there (a quota counts, too), or set TMPDIR to another folder"
    if error.errno == errno.EMFILE:
        return f"{error}; {MORE_FILES}"
    if str(error.filename or "").startswith(str(run.path)):
        return f"{error}; the runs folder {_SHARED}"
    return str(error)


def node_allows_fewer_files() -> bool:
    """Whether the limit of open files is lower here than for the job's keeper; otherwise it is the job's own limit."""
    import resource  # not on Windows, where this package is a library only

    keepers = os.environ.get(OPEN_FILES_VARIABLE, "")
    return keepers.isdecimal() and resource.getrlimit(resource.RLIMIT_NOFILE)[0] < int(keepers)
