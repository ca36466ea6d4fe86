"""Everything that happens to a run, one JSON line each, one file per writer, read merged.

The files lie on shared storage, where appends of several writers to one file are not atomic, so each process that
writes events has a file of its own. A reader takes what it can: a torn or damaged line is passed over.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.run.lines import is_number, read_json_lines

if TYPE_CHECKING:
    from cluster_ddp.run.directory import RunDirectory

# The names of all events. `started` and `resumed` (rank 0 of training) carry step, world_size, total_steps;
# `checkpoint` step, samples; `stopped` step, reason; `completed` step; `failed` step (or null), rank, node, error,
# phase; `rank-failed` rank, node, host, error, and signal when one killed it; `resume-requested` the last attempt
# before it, and cancels: how many `cancelled` there were; `host-suspected` the last attempt before it, host and
# slurm_job_id: Slurm has given the job a host that failed more than once, and the job was asked to avoid it.
SUBMITTED = "submitted"
STARTED = "started"
RESUMED = "resumed"
CHECKPOINT = "checkpoint"
STOP_REQUESTED = "stop-requested"
PREEMPTED = "preempted"
REQUEUED = "requeued"
STOPPED = "stopped"
STALLED = "stalled"
COMPLETED = "completed"
FAILED = "failed"
CANCELLED = "cancelled"
NODE_STARTED = "node-started"
NODE_FINISHED = "node-finished"
NODE_LOST = "node-lost"
RANK_FAILED = "rank-failed"
HANG = "hang"
CHECKPOINT_FAILED = "checkpoint-failed"
CHECKPOINT_DAMAGED = "checkpoint-damaged"
CHECKPOINT_SKIPPED = "checkpoint-skipped"  # step, reason: the save before was still being written
RESUME_REQUESTED = "resume-requested"
HOST_SUSPECTED = "host-suspected"


class EventWriter:
    """Appends events to `events/<writer>.jsonl`.

    Parameters
    ----------
    run
        The run the events belong to.
    writer
        Names the file. No two processes that are alive at once may share it: `login_writer()` on login nodes,
        `node-<rank>` for a node program, `rank-<rank>` for a rank.
    """

    def __init__(self, run: RunDirectory, writer: str) -> None:
        self.path = run.events / f"{re.sub(r'[^A-Za-z0-9._-]', '_', writer)}.jsonl"

    def write(self, event: str, *, attempt: int | None = None, **fields: Any) -> bool:
        """Append one event and wait until it is durable.

        Training must go on when the storage is full, so this does not raise for what the storage says: it warns on
        standard error and returns False.
        """
        line = json.dumps({"time": time.time(), "event": event, "attempt": attempt, **fields}, default=str)
        try:
            _append_line(self.path, line.encode() + b"\n")
        except OSError as error:
            print(f"cluster-ddp: cannot record '{event}' in {self.path}: {error}", file=sys.stderr, flush=True)
            return False
        return True


def login_writer() -> str:
    """The name under which commands that people call on this host write events.

    Two of them at once on one host append to one local page cache, where O_APPEND is atomic.
    """
    import socket  # not for a dry run

    return f"login-{socket.gethostname()}"


def caller() -> str:
    """Who calls a command, for events and stop requests; a container may know users by number only."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def read_events(run: RunDirectory) -> list[dict[str, Any]]:
    """All events of a run, merged by time. What cannot be read, or is not an event, is passed over."""
    try:
        files = sorted(path for path in run.events.iterdir() if path.suffix == ".jsonl")
    except OSError:
        return []
    events = [event for path in files for event in read_json_lines(path) if _is_event(event)]
    events.sort(key=lambda event: float(event["time"]))
    return events


def _is_event(value: dict[str, Any]) -> bool:
    moment, attempt = value.get("time"), value.get("attempt")
    return (
        isinstance(value.get("event"), str)
        and is_number(moment)
        and (attempt is None or (isinstance(attempt, int) and not isinstance(attempt, bool)))
    )


def _append_line(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # the line before was torn: it must not take this one with it
        rest = memoryview(line)
        while len(rest):
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
