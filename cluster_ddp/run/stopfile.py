"""The stop file of an attempt: the request that training save and end now, on shared storage for every node.

It is how a stop reaches a run, whatever started it (sbatch, submitit, local). The node program of each node polls it
and passes the request on to its ranks through the heartbeat file.

Several machines may write it at the same moment, and the last one wins. So a person's decision has a separate file,
which only another decision replaces.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.run.reading import MAX_RECORD, as_number, as_time, parse_object, read_file
from cluster_ddp.run.storage import Storage, write_json
from cluster_ddp.slurm import job_info

if TYPE_CHECKING:
    from cluster_ddp.run.directory import AttemptDirectory

TIME_LIMIT = job_info.TIME_LIMIT
PREEMPTION = job_info.PREEMPTION
TERMINATED = job_info.TERMINATED
CANCEL = job_info.CANCEL
NODE_FAILURE = job_info.NODE_FAILURE
PERSON = "person"
HANG = "hang"
AGENT_LOST = "agent-lost"

# In the order of their codes in the heartbeat file, where 0 means none. Add new ones at the end.
REASONS = (TIME_LIMIT, PREEMPTION, TERMINATED, PERSON, CANCEL, HANG, AGENT_LOST, NODE_FAILURE)
# Reasons that mean a person has decided that the run should not continue by itself.
FINAL_REASONS = frozenset({PERSON, CANCEL})

# Seconds after a stop request at which a script that reports nothing is killed: as long as torchrun gives ranks.
SCRIPT_GRACE_SECONDS = 30.0

SAVE_AND_END = 1
AT_ONCE = 2


@dataclass(frozen=True)
class StopRequest:
    """Why, and how urgently, training should end."""

    reason: str  # one of `REASONS`
    level: int = SAVE_AND_END  # 1: save and end. 2: end immediately, without evaluating or waiting
    grace: float | None = None  # seconds from `time` until the processes are killed; None if not known
    by: str = ""  # who asked, for people
    time: float = 0.0  # Unix seconds of the request


def request_stop(
    attempt: AttemptDirectory, *, reason: str, level: int = SAVE_AND_END, grace: float | None = None, by: str
) -> StopRequest:
    """Ask every node of an attempt to stop, and return the request that now applies.

    An existing request only ever becomes more urgent: its level does not fall, and a person's decision is not replaced
    by a later signal.
    """
    if reason not in REASONS:
        raise ValueError(f"{reason!r} is not a reason to stop; one of {', '.join(REASONS)}")
    wanted = StopRequest(reason, level, grace, by, time.time())
    there = read_stop(attempt)
    if there is not None:
        wanted = replace(wanted, level=max(level, there.level))
        if there.reason in FINAL_REASONS and reason != CANCEL:
            wanted = replace(wanted, reason=there.reason, by=there.by)
    if wanted.reason in FINAL_REASONS:
        write_json(Storage(), attempt.final_stop_file, asdict(wanted))  # first: whoever sees the other sees this too
    write_json(Storage(), attempt.stop_file, asdict(wanted))
    return wanted


def read_stop(attempt: AttemptDirectory) -> StopRequest | None:
    """Read the stop request of an attempt; None if there is none.

    A stop file made by hand (`touch stop`) counts as a request by a person; one that is only half written is read at
    the next poll.
    """
    request = _read(attempt.stop_file)
    if request is None or request.reason in FINAL_REASONS:
        return request
    final = _read(attempt.final_stop_file)
    return request if final is None else replace(request, reason=final.reason, by=final.by)


def _read(file: Path) -> StopRequest | None:
    try:
        data = read_file(file, MAX_RECORD)
    except OSError:
        return None
    value = parse_object(data)
    if value is None:
        return None if data.lstrip().startswith(b"{") else StopRequest(PERSON, by="a stop file made by hand")
    return _request(value)


def _request(value: dict[str, Any]) -> StopRequest:
    reason, level = value.get("reason"), value.get("level")
    return StopRequest(
        reason=reason if reason in REASONS else PERSON,
        level=AT_ONCE if isinstance(level, int) and level >= AT_ONCE else SAVE_AND_END,
        grace=as_number(value.get("grace")),
        by=str(value.get("by", "")),
        time=as_time(value.get("time")) or 0.0,
    )
