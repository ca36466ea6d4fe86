"""A cache, per user, of the states of a folder's ended runs, so that listing many need not read them all again.

Each state is kept with a mark of every file and folder that it was read from, and is valid only while these are
unchanged. The cache can be deleted at any time; only the next listing takes longer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp import __version__
from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.jobs import KnownRun, read_known
from cluster_ddp.run.reading import parse_object, read_file
from cluster_ddp.run.record import JOB_LISTS, RunRecord
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.goodput import Goodput
from cluster_ddp.run.status.report import RunStatus, RunSummary, describe_known, summarize_known
from cluster_ddp.run.status.sweep import NotBegun, describe_element
from cluster_ddp.run.storage import Storage, is_mine, replace_file
from cluster_ddp.slurm.states import SlurmJob

_FORMAT = 2
_MAX_BYTES = 256 << 20  # a hundred thousand runs
_ENDED = (RunState.COMPLETED, RunState.FAILED, RunState.STALLED, RunState.STOPPED, RunState.CANCELLED)
# What changed a moment ago may change again without changing its mark: some file systems count whole seconds, and
# another host's clock may be late.
_REST_SECONDS = 600.0

Marks = dict[str, list[int] | None]


@dataclass(frozen=True)
class EndedRun:
    """A run that ended for good and has not changed since; used like a `KnownRun`, but need not be read."""

    run: RunDirectory
    slurm_job_ids: list[str]
    status: RunStatus  # as it is while Slurm knows none of these jobs


Known = KnownRun | EndedRun | NotBegun
"""What is known of a run, or of a sweep's element, before squeue is asked about its jobs."""


class EndedRuns:
    """The ended runs of one folder that the user has listed before.

    Parameters
    ----------
    folder
        The folder that contains the runs: a runs folder, or that of a sweep.
    """

    def __init__(self, folder: Path) -> None:
        self._file = _cache_folder() / f"ended-{zlib.crc32(os.fsencode(folder)):08x}.json"
        self._header = {"format": _FORMAT, "version": __version__, "folder": str(folder)}
        self._changed = False

    @functools.cached_property
    def _kept(self) -> dict[str, Any]:
        return _read(self._file, self._header)

    def read_known(self, run: RunDirectory) -> KnownRun | EndedRun:
        """Return what to query squeue for, reading from the run only if necessary."""
        return self._recall(run) or read_known(run)

    def describe(self, known: Known, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunStatus:
        """Return the status of a run (see `report.describe`), and remember it if the run has ended."""
        alone = _is_alone(known.slurm_job_ids, slurm_jobs)
        if isinstance(known, EndedRun):
            return known.status if alone else describe_known(read_known(known.run), slurm_jobs)
        status = describe_element(known, slurm_jobs)
        if alone and isinstance(known, KnownRun) and _has_ended(known, status):
            self._keep(known, status)
        return status

    def summarize(self, known: Known, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunSummary:
        """Return the short status of a run, which reads too little to be remembered."""
        if isinstance(known, KnownRun):
            return summarize_known(known, slurm_jobs)
        return self.describe(known, slurm_jobs)

    def save(self, looked_at: Sequence[RunDirectory]) -> None:
        """Write the cache, without runs that no longer exist; failing to write it does not matter."""
        if not self._changed:
            return
        names = {run.path.name for run in looked_at}
        kept = {name: value for name, value in self._kept.items() if name in names}
        body = json.dumps({**self._header, "runs": kept}).encode()
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(Storage(), self._file, b"%08x\n" % zlib.crc32(body) + body, mode=0o600)
        self._changed = False

    def _recall(self, run: RunDirectory) -> EndedRun | None:
        kept = self._kept.get(run.path.name)
        try:
            if kept is None or not _are_as_marked(str(run.path), kept["marks"]):
                return None
            return EndedRun(run, kept["slurm_job_ids"], _status_from(kept["status"]))
        except (KeyError, TypeError, ValueError):
            return None  # written by a different revision of this version, whose statuses have different fields

    def _keep(self, known: KnownRun, status: RunStatus) -> None:
        marks = _marks_of(known.run)
        latest = max((mark[0] for mark in marks.values() if mark is not None), default=0)
        if latest / 1e9 < time.time() - _REST_SECONDS:
            value = {"marks": marks, "slurm_job_ids": known.slurm_job_ids, "status": _to_json(status)}
            self._kept[known.run.path.name] = value
            self._changed = True


def _is_alone(slurm_job_ids: list[str], slurm_jobs: Mapping[str, SlurmJob] | None) -> bool:
    """Whether the state does not depend on Slurm: it knows none of the jobs, or there never was one."""
    return not slurm_job_ids or (slurm_jobs is not None and slurm_jobs.keys().isdisjoint(slurm_job_ids))


def _has_ended(known: KnownRun, status: RunStatus) -> bool:
    over = bool(known.attempts) and known.attempts[-1].ended is not None
    settled = known.record is not None and known.record.submitting is None
    return over and settled and status.state in _ENDED


def _cache_folder() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(folder), "cluster-ddp")


def _read(file: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Return the runs in a cache that this version wrote for this folder; empty if it is damaged or not ours."""
    try:
        data = read_file(file, _MAX_BYTES) if is_mine(file) else b""
    except OSError:
        return {}
    checksum, _, body = data.partition(b"\n")
    value = parse_object(body) if checksum == b"%08x" % zlib.crc32(body) else None
    if value is None or any(value.get(name) != told for name, told in header.items()):
        return {}
    return dict(value["runs"])


def _marks_of(run: RunDirectory) -> Marks:
    """Return a mark of everything that a run's state is read from, by the path in the run.

    The contents of an attempt's or a checkpoint's folder are never written in place, so the mark of the folder
    suffices.
    """
    paths = [run.record_file, run.job_file, run.metrics_file, run.checkpoints, run.attempts, run.events]
    with contextlib.suppress(OSError):
        paths += run.events.iterdir()
    paths += [attempt.path for attempt in list_attempts(run)]
    root = str(run.path)
    return {str(path)[len(root) + 1 :]: _mark(str(path)) for path in paths}


def _mark(path: str) -> list[int] | None:
    """Return when a file was changed, its length and its identity; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]


def _are_as_marked(root: str, marks: Marks) -> bool:
    return all(_mark(f"{root}/{name}") == mark for name, mark in marks.items())


def _to_json(status: RunStatus) -> dict[str, Any]:
    """Convert a whole status to JSON; numbers that are not finite are kept, which only Python's own JSON can do."""
    return {**vars(status), "record": vars(status.record), "goodput": vars(status.goodput)}


def _status_from(value: dict[str, Any]) -> RunStatus:
    lists = {name: tuple(value["record"][name]) for name in JOB_LISTS}
    record = RunRecord(**{**value["record"], **lists})
    told = {"state": RunState(value["state"]), "record": record, "goodput": Goodput(**value["goodput"])}
    return RunStatus(**{**value, **told, "warnings": tuple(value["warnings"])})
