"""The ranks of this node: finding them below the agent, matching them with the heartbeat file, reading their errors."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.errors import Cause
from cluster_ddp.launch.logs import last_lines
from cluster_ddp.launch.node.heartbeat import HeartbeatFile, RankSlot
from cluster_ddp.launch.processes import cpu_seconds, is_alive, marked_processes
from cluster_ddp.launch.torchrun.exits import StartedRank
from cluster_ddp.run.phase import Phase

# How an error begins on standard error: Python's, or the trainer's own message, which may have several lines.
_BEGINS_ERROR = re.compile(r"(?:Exception Group )?Traceback \(most|cluster-ddp: rank \d+(:| ends because )")
_GROUP = re.compile(r" +\+ Exception Group Traceback")
_OF_GROUP = re.compile(r"^ +[|+] ?")  # in front of each line of its traceback
_CPP_WHAT = re.compile(r"  what\(\): .*\w")  # the message of a C++ exception that nobody caught
_OWN_PREFIX = re.compile(r"^cluster-ddp: rank \d+: ")


@dataclass(frozen=True)
class Rank:
    """A rank's process, as torchrun started it."""

    pid: int
    rank: int  # global rank
    local_rank: int
    # stdout, stderr: its log files; None if the system does not reveal them
    stdout: Path | None
    stderr: Path | None
    error_file: Path | None  # where a rank may leave its exception for torchrun
    since: float = field(default_factory=time.monotonic)  # `time.monotonic()` when it was first seen


@dataclass(frozen=True)
class RankError:
    """The error that a dead rank left."""

    message: str  # a traceback, or the trainer's own message
    time: float  # Unix seconds when it was written


class LocalRanks:
    """The ranks below one agent, over the restarts of max_restarts."""

    def __init__(self, heartbeat: HeartbeatFile, procs: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._procs = procs
        self._clock = clock
        self._living: dict[int, Rank] = {}
        self.seen: dict[int, Rank] = {}  # all ranks so far, by process id
        self.none_since: float | None = None  # when the last living rank ended; None while any lives

    @property
    def living(self) -> list[Rank]:
        """The ranks that were alive at the last `poll`."""
        return list(self._living.values())

    def poll(self, started: Iterable[StartedRank] = ()) -> list[Rank]:
        """Find new ranks, and return those that have ended since the last call.

        Parameters
        ----------
        started
            Those that the agent has recorded and that have not ended, as far as it has: a program that has written its
            title over its environment (setproctitle) is found only by this.
        """
        gone = [rank for rank in self._living.values() if not is_alive(rank.pid)]
        for rank in gone:
            del self._living[rank.pid]
        if len(self._living) < self._procs:
            for rank in [*_find(self._heartbeat.path), *map(_as_recorded, started)]:
                if rank.pid not in self.seen and is_alive(rank.pid):
                    self._living[rank.pid] = self.seen[rank.pid] = rank
        if self._living or not self.seen:
            self.none_since = None
        elif self.none_since is None:
            self.none_since = self._clock()
        return gone

    def add_unseen(self, pid: int, rank: int, local_rank: int, logs: Path) -> Rank:
        """Add a rank that ended before it was ever seen alive; torchrun's log folder layout says where its logs are."""
        folders = sorted(logs.glob(f"*/attempt_*/{local_rank}"), key=lambda folder: folder.stat().st_mtime)
        stdout, stderr, error = (
            folders[-1] / name if folders else None for name in ("stdout.log", "stderr.log", "error.json")
        )
        self.seen[pid] = Rank(pid, rank, local_rank, stdout, stderr, error)
        return self.seen[pid]

    def slots(self) -> list[RankSlot]:
        """The slots of the living ranks; a rank that died leaves its last step and phase in its slot."""
        return [slot for slot in self._heartbeat.slots if slot.pid in self._living]

    def unregistered(self) -> list[Rank]:
        """The living ranks that do not use the heartbeat file: not yet, or never in the case of a script."""
        return [rank for rank in self.living if self.phase(rank) is None]

    def phase(self, rank: Rank) -> Phase | None:
        """Return what a rank says it is doing; None if it has no heartbeat."""
        slot = self._heartbeat.slots[rank.local_rank]
        return slot.phase if slot.pid == rank.pid else None

    def cause(self, rank: Rank) -> Cause | None:
        """Return why a rank says it failed; None if it has not said so."""
        slot = self._heartbeat.slots[rank.local_rank]
        return slot.cause if slot.pid == rank.pid else None

    def step(self, rank: Rank) -> int | None:
        """Return the last step that a rank finished; None before the first, and for a rank without a heartbeat."""
        slot = self._heartbeat.slots[rank.local_rank]
        return slot.step if slot.pid == rank.pid and slot.step >= 0 else None

    def all_done(self) -> bool:
        """Whether every rank of the node has said that its work is done."""
        return all(slot.pid and slot.phase is Phase.DONE for slot in self._heartbeat.slots)

    def cpu_seconds(self) -> dict[int, float]:
        """Return the CPU time that the ranks and the processes they have started have used so far, by process id."""
        started = (process for process in marked_processes(self._heartbeat.path) if "RANK" in process.environment)
        return {pid: cpu_seconds(pid) for pid in [*self._living, *(process.pid for process in started)]}

    def done_for(self) -> float | None:
        """Return for how many seconds all ranks of the node have been done while any is alive; None if they are not."""
        if not self._living or not self.all_done():
            return None
        return self._clock() - max(slot.beat_ns for slot in self._heartbeat.slots) / 1e9


def _find(heartbeat: Path) -> Iterable[Rank]:
    for process in marked_processes(heartbeat):
        variables = process.environment
        if process.leads_session and variables.get("RANK", "").isdigit() and variables.get("LOCAL_RANK", "").isdigit():
            named = variables.get("TORCHELASTIC_ERROR_FILE")
            error_file = Path(named) if named else None
            yield Rank(
                pid=process.pid,
                rank=int(variables["RANK"]),
                local_rank=int(variables["LOCAL_RANK"]),
                stdout=_file_behind(process.pid, 1, error_file and error_file.with_name("stdout.log")),
                stderr=_file_behind(process.pid, 2, error_file and error_file.with_name("stderr.log")),
                error_file=error_file,
            )


def _as_recorded(started: StartedRank) -> Rank:
    stdout, stderr, error = (Path(started.folder) / name for name in ("stdout.log", "stderr.log", "error.json"))
    return Rank(started.pid, started.rank, started.local_rank, stdout, stderr, error)


def _file_behind(pid: int, descriptor: int, usual: Path | None) -> Path | None:
    """Return the file a process writes to, or `usual` if the process is just ending."""
    path = usual
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
    return path if path is not None and path.is_file() else None


def read_error(rank: Rank) -> RankError | None:
    """Read the error of a dead rank: from its error file, else from the end of its stderr if there is one."""
    if rank.error_file is not None and (found := _from_error_file(rank.error_file)):
        return found
    if rank.stderr is None:
        return None
    lines = last_lines(rank.stderr)
    if any(_GROUP.match(line) for line in lines):
        lines = [_OF_GROUP.sub("", line) for line in lines]
    first = next((number for number in range(len(lines) - 1, -1, -1) if _BEGINS_ERROR.match(lines[number])), None)
    if first is None:
        said = [number for number, line in enumerate(lines) if "Error" in line or _CPP_WHAT.match(line)]
        if not said:
            return None
        first = next((number for number in said if _CPP_WHAT.match(lines[number])), said[0])
    message = _OWN_PREFIX.sub("", "\n".join(lines[first:]))
    return RankError(message, rank.stderr.stat().st_mtime)


def _from_error_file(path: Path) -> RankError | None:
    """Read torchrun's ``{"message": text}`` or ``{"message": {"message": text, "extraInfo": {"timestamp": ...}}}``."""
    try:
        message: Any = json.loads(path.read_bytes())["message"]
        moment = path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        with contextlib.suppress(TypeError, ValueError, KeyError):
            moment = float(extra["timestamp"])  # type: ignore[index]
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = callstack or message.get("message", "")
    return RankError(str(message).strip(), moment)
