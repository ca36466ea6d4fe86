"""The run's identity, `run.json`: small, replaced as a whole, and kept from the first submission to the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.run.directory import copied_from
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.liveness import claim, is_claimed
from cluster_ddp.run.lock import change_file
from cluster_ddp.run.reading import MAX_RECORD, as_size, as_time, as_whole, read_file
from cluster_ddp.run.storage import Storage, json_bytes, write_json
from cluster_ddp.run.via import QUEUED
from cluster_ddp.slurm.states import is_job_id

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec
    from cluster_ddp.run.directory import RunDirectory

_PACKAGES = ("cluster_ddp", "torch", "submitit", "numpy", "safetensors", "xxhash", "wandb")
_GIT_SECONDS = 5.0
JOB_LISTS = ("slurm_job_ids", "jobs_of_original")
_COMMENT = "cluster_ddp "  # begins the comment of our jobs; the run's id follows


@dataclass(frozen=True)
class RunRecord:
    """What cannot be derived from the job file: which run it is and what it was made with."""

    id: str
    name: str
    created: float  # Unix seconds
    via: str  # how it is started: one of the ways in `cluster_ddp.run.via`
    wandb_id: str
    # Every Slurm job that was submitted for the run, the latest last. A requeued job keeps its id
    slurm_job_ids: tuple[str, ...] = ()
    # Commit of the user's code at submission, with `-dirty` if it had changes; None outside git
    git_revision: str | None = None
    # Of Python and relevant packages, where the run was submitted
    versions: dict[str, str] = field(default_factory=dict)
    # nodes, procs: nodes and ranks per node of the last attempt; before the first, those of the job file. None: decided
    # on the node
    nodes: int | None = None
    procs: int | None = None
    global_batch: int | None = None  # samples per step, fixed by the first attempt for the life of the run
    # The process that submits a job to a batch system, and since when, until the job's id is noted. If that process is
    # gone, the job may or may not be in the queue
    submitting: dict[str, Any] | None = None
    directory: str | None = None  # where the run was made, or began as a copy; None in records of older versions
    # Of a copy that has been started: the Slurm jobs that it has from its original, and how many attempts
    jobs_of_original: tuple[str, ...] = ()
    attempts_of_original: int = 0

    @property
    def busy(self) -> bool:
        """Whether a process is submitting a job of the run to a batch system."""
        return is_claimed(self.submitting)


@dataclass(frozen=True)
class OrphanedJob:
    """How squeue shows a job that may have been submitted for a run, but whose id nobody has noted."""

    names: frozenset[str]  # of the run or the sweep; its comment contains one of them
    task: int | None = None  # of the sweep's array
    noted_arrays: frozenset[str] = frozenset()  # of the sweep, which begin with different elements


_FIELDS = frozenset(field.name for field in dataclasses.fields(RunRecord))
_NEEDED = [
    field.name
    for field in dataclasses.fields(RunRecord)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
]


def new_record(spec: JobSpec, run: RunDirectory, *, run_id: str, via: str) -> RunRecord:
    """Make the record of a new run."""
    return RunRecord(
        id=run_id,
        directory=str(run.path.absolute()),
        name=spec.name,
        created=time.time(),
        via=via,
        wandb_id=os.urandom(6).hex(),
        git_revision=_git_revision(code_folder(spec)),
        versions=package_versions(),
        nodes=spec.slurm.nodes,
        procs=spec.launch.fixed_procs,
        submitting=claim() if via in QUEUED else None,
    )


def read_record(run: RunDirectory) -> RunRecord:
    """Read the record of a run.

    Raises
    ------
    RunError
        It cannot be read or was not written by this package, or one of the run's folders is a link.
    """
    run.refuse_links()
    try:
        record = _record_of(json.loads(read_file(run.record_file, MAX_RECORD)))
        noted, of_original = (tuple(map(str, getattr(record, name))) for name in JOB_LISTS)
        return dataclasses.replace(record, slurm_job_ids=noted, jobs_of_original=of_original)
    except FileNotFoundError:
        raise RunError(f"{run.record_file} does not exist; without it {run.path} is not a run") from None
    except OSError as error:
        raise RunError(f"{run.record_file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RunError(
            f"{run.record_file} cannot be read: it was not written by cluster_ddp, or is damaged ({why}). To resume "
            "the run, put a copy of it back; checkpoints and export work without it"
        ) from error


def _record_of(value: object) -> RunRecord:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if missing := [name for name in _NEEDED if name not in value]:
        raise ValueError(f"it has no {', '.join(missing)}")
    record = RunRecord(**{key: entry for key, entry in value.items() if key in _FIELDS})
    _check_kinds(record)
    return record


_KINDS: dict[tuple[str, ...], Callable[[Any], bool]] = {
    ("id", "name", "via", "wandb_id", "git_revision", "directory"): lambda value: isinstance(value, str),
    ("created",): lambda value: as_time(value) is not None,
    ("attempts_of_original",): lambda value: as_whole(value) is not None,
    ("versions",): lambda value: isinstance(value, dict) and all(isinstance(part, str) for part in value.values()),
    ("nodes", "procs"): lambda value: as_size(value) is not None,
    ("global_batch",): lambda value: (as_whole(value) or 0) > 0,
    ("submitting",): lambda value: isinstance(value, dict),
    JOB_LISTS: lambda value: isinstance(value, (list, tuple)) and all(is_job_id(str(job_id)) for job_id in value),
}
_MAY_BE_NONE = frozenset({"git_revision", "directory", "nodes", "procs", "global_batch", "submitting"})


def _check_kinds(record: RunRecord) -> None:
    for names, is_right in _KINDS.items():
        for name in names:
            value = getattr(record, name)
            if not is_right(value) and not (value is None and name in _MAY_BE_NONE):
                raise ValueError(f"{name} has a value that cluster_ddp never writes")


def write_record(storage: Storage, run: RunDirectory, record: RunRecord) -> None:
    """Write the whole record in one step."""
    write_json(storage, run.record_file, dataclasses.asdict(record))


def update_record(run: RunDirectory, **changes: Any) -> None:
    """Change some fields of the record; other processes' changes are kept."""
    _change(run, lambda record: dataclasses.replace(record, **changes))


def add_slurm_job(run: RunDirectory, job_id: str) -> None:
    """Note a further Slurm job of the run, which ends its submission; see `update_record`."""
    _change(
        run,
        lambda record: (
            record
            if job_id in record.slurm_job_ids
            else dataclasses.replace(record, slurm_job_ids=(*record.slurm_job_ids, job_id), submitting=None)
        ),
    )


def announce_submission(run: RunDirectory) -> None:
    """Note that this process is about to submit a job of the run to a batch system, until the job's id is noted."""
    update_record(run, submitting=claim())


def slurm_comment(run_id: str) -> str:
    """Return the comment of a run's Slurm jobs, which identifies them: Slurm reuses job ids."""
    return f"{_COMMENT}{run_id}"


def original_of(run: RunDirectory, record: RunRecord) -> Path | None:
    """Return the run directory that this one is a copy of; None if it is not a copy, or has been started as one."""
    return copied_from(run.record_file, record.directory)


def begin_as_copy(run: RunDirectory, attempts: int) -> None:
    """Note in a copy, which is about to be started, that the jobs and attempts it has so far are its original's.

    Parameters
    ----------
    attempts
        How many those are.
    """

    def change(record: RunRecord) -> RunRecord:
        jobs = tuple(dict.fromkeys((*record.jobs_of_original, *record.slurm_job_ids)))
        return dataclasses.replace(
            record, directory=str(run.path.absolute()), jobs_of_original=jobs, attempts_of_original=attempts
        )

    try:
        record = read_record(run)
    except RunError:  # as for a run that has none; whoever needs it says so
        return
    if original_of(run, record) is not None:
        _change(run, change)


def is_of_original(run: RunDirectory, record: RunRecord, job_id: str | None) -> bool:
    """Whether the run is a copy, and that job one of its original's."""
    return job_id in record.jobs_of_original or original_of(run, record) is not None


def names_in_comments(run: RunDirectory, record: RunRecord | None) -> set[str]:
    """Return the names of this run in job comments: its folder's name, its sweep's, and the id that it was made with.

    A person may have renamed the folder since. The jobs of a copy next to the original belong to the original.
    """
    names = {run.id} | ({run.sweep_id} if run.sweep_id else set())
    if record is not None and not os.path.lexists(run.path.parent / record.id / run.record_file.name):
        names.add(record.id)
    return names


def orphaned_job(run: RunDirectory, record: RunRecord) -> OrphanedJob | None:
    """Return how to recognize a job whose submitter was killed while submitting it; None if that did not happen.

    The name of an element, which its own job's comment contains, may also be used in a different sweep.
    """
    if record.submitting is None or record.busy or run.sweep_id is not None or original_of(run, record) is not None:
        return None
    return OrphanedJob(frozenset(names_in_comments(run, record)))


def run_in_comment(comment: str) -> str | None:
    """Return the run that the comment of a Slurm job names, in front of the job file's own comment; None if none."""
    words = comment.removeprefix(_COMMENT).split() if comment.startswith(_COMMENT) else []
    return words[0] if words else None


def _change(run: RunDirectory, change: Callable[[RunRecord], RunRecord]) -> None:
    def content() -> bytes | None:
        before = read_record(run)
        after = change(before)
        return None if after == before else json_bytes(dataclasses.asdict(after))

    change_file(Storage(), run.record_file, content)


def code_folder(spec: JobSpec) -> Path:
    """Return where the user's code is, according to the job file."""
    source = spec.script or (spec.task or "").rpartition(":")[0]
    return Path(source).parent if os.sep in str(source) else Path.cwd()


def _git_revision(folder: Path) -> str | None:
    import subprocess  # needed only where a run is made, which most processes that use this module do not do

    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def package_versions() -> dict[str, str]:
    """Return the versions of Python and relevant packages here, without packages that are not installed."""
    import importlib.metadata  # slow to load, and needed only where a run or an attempt is made

    versions = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
