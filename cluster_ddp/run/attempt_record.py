"""Who began an attempt, where and when: `attempts/NNN/attempt.json`."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.liveness import ProcessIdentity, read_identity
from cluster_ddp.run.reading import as_size, as_time, as_whole, read_json_object, refuse_passing
from cluster_ddp.run.storage import Storage, write_json
from cluster_ddp.slurm.states import is_job_id

LAST_NUMBER = 999_999  # the highest attempt number
_NUMBER = re.compile(r"[0-9]{3,6}")


@dataclass(frozen=True)
class AttemptRecord:
    """What is recorded about an attempt besides its events."""

    number: int  # 0 for the first attempt of the run
    # begun, ended: Unix seconds. `ended` is None until the attempt is concluded, and stays None if it is killed
    begun: float
    # The process that lives as long as the attempt: the keeper, or the supervisor of a local start. None if its record
    # is damaged
    process: ProcessIdentity | None
    # slurm_job_id, restart_count: the allocation; Slurm counts restarts of the same job from 0
    slurm_job_id: str | None = None
    restart_count: int = 0
    # nodes, procs: nodes and ranks per node; None if not known
    nodes: int | None = None
    procs: int | None = None
    ended: float | None = None
    cluster: str | None = None  # what Slurm calls the cluster; None without Slurm, or if not known

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, with the process's fields next to the others."""
        value = asdict(self)
        value.update(value.pop("process") or {})
        return value


def read_attempt(attempt: AttemptDirectory, *, strict: bool = False) -> AttemptRecord:
    """Read the record of an attempt; what is missing or damaged in it counts as unknown.

    For `strict`, see `cluster_ddp.run.events.read_events`.
    """
    value = read_json_object(attempt.record_file, strict=strict) or {}
    job_id, cluster = value.get("slurm_job_id"), value.get("cluster")
    return AttemptRecord(
        number=attempt.number,
        begun=as_time(value.get("begun")) or _folder_time(attempt),
        process=read_identity(value),
        slurm_job_id=str(job_id) if is_job_id(str(job_id)) else None,
        restart_count=as_whole(value.get("restart_count")) or 0,
        nodes=as_size(value.get("nodes")),
        procs=as_size(value.get("procs")),
        ended=as_time(value.get("ended")),
        cluster=cluster if isinstance(cluster, str) else None,
    )


def list_attempts(run: RunDirectory, *, strict: bool = False) -> list[AttemptDirectory]:
    """List the attempts of a run by number; empty if they cannot be listed.

    For `strict`, see `cluster_ddp.run.events.read_events`.
    """
    try:
        return [run.attempt(number) for number in attempt_numbers(run)]
    except OSError as error:
        if strict:
            refuse_passing(run.attempts, error)
        return []


def attempt_numbers(run: RunDirectory) -> list[int]:
    """Return the numbers of a run's attempts, ascending; empty if it has no folder for them.

    Every attempt has a record from the moment its folder appears, so a folder without one is not an attempt.

    Raises
    ------
    OSError
        The folder cannot be read.
    """
    try:
        names = os.listdir(run.attempts)
    except FileNotFoundError:
        return []
    numbers = sorted({int(name) for name in names if _NUMBER.fullmatch(name)})
    return [number for number in numbers if _is_recorded(run.attempt(number))]


def is_in_the_way(attempt: AttemptDirectory) -> bool:
    """Whether something that is not an attempt has this attempt's place."""
    return os.path.lexists(attempt.path) and not _is_recorded(attempt)


def _is_recorded(attempt: AttemptDirectory) -> bool:
    """Whether the folder holds what only an attempt writes; its origin counts even if its record was lost."""
    return _may_exist(attempt.record_file) or _may_exist(attempt.origin_file)


def _may_exist(file: Path) -> bool:
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # the storage is unavailable: nothing is known
        return True
    return True


def is_superseded(attempt: AttemptDirectory) -> bool:
    """Whether a newer attempt of the run has begun: then this one, which may be cut off, has to end without saving."""
    return any(other.number > attempt.number for other in list_attempts(attempt.run))


def end_attempt(attempt: AttemptDirectory) -> None:
    """Record that an attempt is over: none of its processes will write to the run any more."""
    record = replace(read_attempt(attempt), ended=time.time())
    write_json(Storage(), attempt.record_file, record.to_json())


def _folder_time(attempt: AttemptDirectory) -> float:
    try:
        return attempt.path.stat().st_mtime
    except OSError:
        return 0.0
