"""Everything that happens to a run: one JSON line per event, one file per writer and host, merged by readers.

The files are on shared storage, where appends from several hosts to one file are not atomic, and an attempt may still
be alive elsewhere while the next one runs. So no two hosts write to the same file; on one host appends are atomic. A
reader skips torn or damaged lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.printing import say
from cluster_ddp.run.digest import Digest, read_digest
from cluster_ddp.run.reading import MAX_LINES, as_time, as_whole, parse_lines, read_on, refuse_passing
from cluster_ddp.run.storage import Storage, open_lines

if TYPE_CHECKING:
    from cluster_ddp.run.directory import AttemptDirectory, RunDirectory

# The names of all events. Their fields:
# started, resumed (by rank 0 of training): step, world_size, total_steps
# checkpoint: step, samples
# stopped: step, reason
# completed: step
# failed: step (or null), rank, node, error, phase, cause: one of `cluster_ddp.errors.Cause`
# rank-failed: rank, node, host, error, cause, and signal if one killed it
# node-failed: host, error, and suspect: whether the node itself may be bad (its node program did not come up, or its
#     agent gave up before starting any ranks)
# resume-requested: the last attempt before it, and cancels: how many `cancelled` there were
# resume-refused: the last attempt before the request, which was alive, or Slurm took no job
# hang: step, rank, phase, reason, and stopped if a signal has stopped the process of the rank
# host-suspected: the last attempt before it, host and slurm_job_id: Slurm gave the job a host that failed more than
#     once, and the job was asked to avoid it
SUBMITTED = "submitted"
STARTED = "started"
RESUMED = "resumed"
CHECKPOINT = "checkpoint"
STOP_REQUESTED = "stop-requested"
PREEMPTED = "preempted"
REQUEUED = "requeued"
START_FAILED = "start-failed"  # by the batch script: slurm_job_id, restart_count, host, by_slurm, reason, queued
START_REFUSED = "start-refused"  # slurm_job_id, message: an attempt was alive, so none began in this job
REQUEUE_DELAYED = "requeue-delayed"  # reason: Slurm does not answer; the keeper keeps trying
REQUEUE_FAILED = "requeue-failed"  # reason
STOPPED = "stopped"
STALLED = "stalled"
COMPLETED = "completed"
FAILED = "failed"
CANCELLED = "cancelled"
NODE_STARTED = "node-started"
NODE_FINISHED = "node-finished"
NODE_LOST = "node-lost"
NODE_TAKEN = "node-taken"  # host, reason: the job was made smaller while it ran (scontrol update NumNodes=)
NODE_FAILED = "node-failed"
RANK_FAILED = "rank-failed"
HANG = "hang"
CHECKPOINT_FAILED = "checkpoint-failed"
CHECKPOINT_DAMAGED = "checkpoint-damaged"
REMOVAL_FAILED = "removal-failed"  # name, reason: a checkpoint that should be gone still takes up space
CHECKPOINT_SKIPPED = "checkpoint-skipped"  # step, reason: the previous save was still being written
RESUME_REQUESTED = "resume-requested"
RESUME_REFUSED = "resume-refused"
HOST_SUSPECTED = "host-suspected"
NOTIFIED = "notified"  # state, error: the command of notify: was run; what went wrong with it (or null)
WARNING = "warning"  # rank, host, message: training continues, but the user should know

# The values that are computed with, compared or looked up; one of a wrong type is treated as missing.
_WHOLE = frozenset({"step", "samples", "total_steps", "world_size", "rank", "cancels"})
_PLAIN = frozenset(
    {"node", "host", "signal", "reason", "error", "cause", "by", "phase", "outcome", "via", "slurm_job_id", "training"}
)


class EventWriter:
    """Appends events to `events/<writer>.jsonl`.

    Parameters
    ----------
    writer
        Names the file, and differs from host to host: `on_this_host`, or `login_writer` for commands called by people.
    """

    def __init__(self, run: RunDirectory, writer: str) -> None:
        self.run = run
        self.path = run.events / f"{re.sub(r'[^A-Za-z0-9._-]', '_', writer)}.jsonl"

    def write(self, event: str, *, attempt: int | None = None, **fields: Any) -> bool:
        """Append one event and wait until it is durable.

        Training must continue when the storage is full, so a storage error is not raised: this warns on standard error
        and returns False.
        """
        line = json.dumps({"time": time.time(), "event": event, "attempt": attempt, **fields}, default=str)
        try:
            try:
                _append_line(self.path, line.encode() + b"\n")
            except FileNotFoundError:  # the folder was removed while the run was training; not if the run itself was
                with contextlib.suppress(FileExistsError):
                    Storage().mkdir(self.run.events)
                _append_line(self.path, line.encode() + b"\n")
        except OSError as error:
            say(f"cluster-ddp: cannot record '{event}' in {self.path}: {error}")
            return False
        return True


def on_this_host(role: str) -> str:
    """Return the name under which processes of this role write events on this host, and on no other."""
    import socket  # not needed for a dry run

    return f"{role}-{socket.gethostname()}"


def login_writer() -> str:
    """Return the name under which commands called by people on this host write events."""
    return on_this_host("login")


def caller() -> str:
    """Return who called a command, for events and stop requests; in a container a user may have only a number."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def read_events(run: RunDirectory, *, strict: bool = False) -> list[dict[str, Any]]:
    """Read all events of a run that matter, merged by time. What cannot be read, or is not an event, is skipped.

    For attempts that are over, what many nodes reported alike may appear once: see `cluster_ddp.run.condense`.

    Parameters
    ----------
    strict
        Raise `RunError` instead if storage fails in a way that may pass, for callers that decide what happens next.
    """
    whole, torn = _read(run, read_digest(run.digest_file), strict=strict)
    return sorted([*whole.events, *torn], key=_time)


def read_events_of(attempt: AttemptDirectory, *names: str) -> list[dict[str, Any]]:
    """Read the events of one attempt by time; only those with the given names, if any are given."""
    own = (event for event in read_events(attempt.run) if event["attempt"] == attempt.number)
    return [event for event in own if not names or event["event"] in names]


def read_whole_events(run: RunDirectory) -> Digest:
    """Read the events as `read_events` does, except lines still being written, and how far each file was read."""
    whole, _ = _read(run, read_digest(run.digest_file))
    return Digest(tuple(sorted(whole.events, key=_time)), whole.places)


def _read(run: RunDirectory, digest: Digest, *, strict: bool = False) -> tuple[Digest, list[dict[str, Any]]]:
    """Read the updated digest, and the events in lines that do not end yet."""

    def skip(path: Path, error: OSError) -> None:
        if strict:
            refuse_passing(path, error)

    try:
        names = sorted(os.listdir(run.events))
    except OSError as error:
        skip(run.events, error)
        return Digest(), []
    if not digest.places.keys() <= set(names):
        return _read(run, Digest(), strict=strict)
    events, torn, places = _events_among(digest.events), [], dict(digest.places)
    for name in names:
        if not name.endswith(".jsonl"):
            continue
        try:
            data, begin = read_on(run.events / name, places.get(name, 0), MAX_LINES)
        except OSError as error:
            skip(run.events / name, error)
            continue
        if begin is None:  # the digest belongs to different files
            return _read(run, Digest(), strict=strict)
        end = data.rfind(b"\n") + 1
        places[name] = begin + end
        events += _events_among(_lines(data[:end])) if end else []
        torn += _events_among(_lines(data[end:])) if end < len(data) else []
    return Digest(tuple(events), places), torn


def _lines(data: bytes) -> list[dict[str, Any]]:
    """Parse lines of JSON. The batch script records what programs say, which may not be UTF-8, and cannot tell."""
    return parse_lines(data.decode(errors="replace").encode())


def _events_among(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_known(value) for value in values if _is_event(value)]


def _time(event: dict[str, Any]) -> float:
    return float(event["time"])


def _is_event(value: dict[str, Any]) -> bool:
    attempt = value.get("attempt")
    named = isinstance(value.get("event"), str)
    return named and as_time(value.get("time")) is not None and (attempt is None or as_whole(attempt) is not None)


def _known(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event without values of types that this package never writes."""
    strange = [
        name
        for name, value in event.items()
        if (name in _WHOLE or (name in _PLAIN and not isinstance(value, str)))
        and value is not None
        and as_whole(value) is None
    ]
    return {name: value for name, value in event.items() if name not in strange} if strange else event


def _append_line(path: Path, line: bytes) -> None:
    fd, torn_end = open_lines(path)
    try:
        Storage().write(fd, torn_end + line)
        os.fsync(fd)
    finally:
        os.close(fd)
