"""Who began an attempt, where and when: `attempts/NNN/attempt.json`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.lines import is_number, read_json_object
from cluster_ddp.run.liveness import ProcessIdentity, read_identity
from cluster_ddp.run.storage import Storage, write_json


@dataclass(frozen=True)
class AttemptRecord:
    """What is known about an attempt besides its events.

    Attributes
    ----------
    number
        0 for the first attempt of the run.
    begun, ended
        Unix seconds. `ended` is None as long as the attempt has not been concluded, which one that is killed never is.
    process
        The process whose life is the attempt's: the batch script, the supervisor of a local start. None when its
        record is damaged.
    slurm_job_id, restart_count
        The allocation; Slurm counts restarts of the same job from 0.
    nodes, procs
        Nodes and ranks per node; None when it was not known.
    """

    number: int
    begun: float
    process: ProcessIdentity | None
    slurm_job_id: str | None = None
    restart_count: int = 0
    nodes: int | None = None
    procs: int | None = None
    ended: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As it is written, the process's fields beside the others."""
        value = asdict(self)
        value.update(value.pop("process") or {})
        return value


def read_attempt(attempt: AttemptDirectory) -> AttemptRecord:
    """The record of an attempt; what is missing or damaged in it is as good as unknown."""
    value = read_json_object(attempt.record_file) or {}
    job_id = value.get("slurm_job_id")
    return AttemptRecord(
        number=attempt.number,
        begun=_time(value.get("begun")) or _folder_time(attempt),
        process=read_identity(value),
        slurm_job_id=str(job_id) if isinstance(job_id, (str, int)) else None,
        restart_count=_count(value.get("restart_count")) or 0,
        nodes=_count(value.get("nodes")),
        procs=_count(value.get("procs")),
        ended=_time(value.get("ended")),
    )


def list_attempts(run: RunDirectory) -> list[AttemptDirectory]:
    """The attempts of a run by number."""
    try:
        names = [path.name for path in run.attempts.iterdir()]
    except OSError:
        return []
    return [run.attempt(number) for number in sorted(int(name) for name in names if _is_number(name))]


def last_attempt(run: RunDirectory) -> AttemptDirectory | None:
    """The latest attempt of a run; None before the first."""
    attempts = list_attempts(run)
    return attempts[-1] if attempts else None


def find_attempt(run: RunDirectory, slurm_job_id: str, restart_count: int) -> AttemptDirectory | None:
    """The attempt that one allocation has begun, the latest if Slurm used the id again; None before it has."""
    for attempt in reversed(list_attempts(run)):
        record = read_attempt(attempt)
        if (record.slurm_job_id, record.restart_count) == (slurm_job_id, restart_count):
            return attempt
    return None


def end_attempt(attempt: AttemptDirectory) -> None:
    """Note that an attempt is over: none of its processes will write to the run any more.

    Raises
    ------
    OSError
        The attempt's folder cannot be written.
    """
    record = replace(read_attempt(attempt), ended=time.time())
    write_json(Storage(), attempt.record_file, record.to_json())


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) >= 3


def _folder_time(attempt: AttemptDirectory) -> float:
    try:
        return attempt.path.stat().st_mtime
    except OSError:
        return 0.0


def _time(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
