"""The run's identity, `run.json`: small, replaced as a whole, the same from the first submission to the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.run.errors import RunError
from cluster_ddp.run.lines import is_number
from cluster_ddp.run.storage import Storage, write_json

if TYPE_CHECKING:
    from cluster_ddp.run.directory import RunDirectory
    from cluster_ddp.spec import JobSpec

_PACKAGES = ("cluster_ddp", "torch", "submitit", "numpy", "safetensors", "xxhash", "wandb")
_GIT_SECONDS = 5.0
_LOCK_WAIT_SECONDS = 10.0
_LOCK_STALE_SECONDS = 30.0


@dataclass(frozen=True)
class RunRecord:
    """What does not follow from the job file: who the run is and what it was made with.

    Attributes
    ----------
    created
        Unix seconds.
    via
        sbatch, submitit, local or manual.
    slurm_job_ids
        Every Slurm job that was submitted for the run, the latest last. A requeued job keeps its id.
    git_revision
        Commit of the user's code at submission, with `-dirty` when it had changes; None outside git.
    versions
        Of Python and the packages that matter, where the run was submitted.
    nodes, procs
        Nodes and ranks per node of the last attempt; of the job file before the first. None: decided on the node.
    global_batch
        Samples per step, resolved at the first attempt and kept for the life of the run.
    """

    id: str
    name: str
    created: float
    via: str
    wandb_id: str
    slurm_job_ids: tuple[str, ...] = ()
    git_revision: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    nodes: int | None = None
    procs: int | None = None
    global_batch: int | None = None


def new_record(spec: JobSpec, *, run_id: str, via: str) -> RunRecord:
    """The record of a run that is about to be made."""
    procs = spec.launch.procs_per_node
    return RunRecord(
        id=run_id,
        name=spec.name,
        created=time.time(),
        via=via,
        wandb_id=os.urandom(6).hex(),
        git_revision=_git_revision(_code_folder(spec)),
        versions=_versions(),
        nodes=spec.slurm.nodes,
        procs=procs if isinstance(procs, int) else None,
    )


def read_record(run: RunDirectory) -> RunRecord:
    """The record of a run.

    Raises
    ------
    RunError
        It cannot be read or is not what this package wrote.
    """
    try:
        value = json.loads(run.record_file.read_bytes())
        known = {one.name for one in dataclasses.fields(RunRecord)}
        record = RunRecord(**{key: entry for key, entry in value.items() if key in known})
        _check_kinds(record)
        return dataclasses.replace(record, slurm_job_ids=tuple(map(str, record.slurm_job_ids)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{run.record_file} cannot be read ({error}); without it {run.path} is not a run") from error


def _check_kinds(record: RunRecord) -> None:
    texts = (record.id, record.name, record.via, record.wandb_id)
    counts = (one for one in (record.nodes, record.procs, record.global_batch) if one is not None)
    right = (
        all(isinstance(text, str) for text in texts)
        and is_number(record.created)
        and all(isinstance(count, int) and count > 0 for count in counts)
        and isinstance(record.slurm_job_ids, (list, tuple))
    )
    if not right:
        raise ValueError("a value in it is of the wrong kind")


def write_record(storage: Storage, run: RunDirectory, record: RunRecord) -> None:
    """Write the whole record in one step."""
    write_json(storage, run.record_file, dataclasses.asdict(record))


def update_record(run: RunDirectory, **changes: Any) -> RunRecord:
    """Change some fields of the record and return the new one; other processes' changes are kept.

    Raises
    ------
    RunError
        The record cannot be read.
    OSError
        It cannot be written.
    """
    with _lock(run):
        record = dataclasses.replace(read_record(run), **changes)
        write_record(Storage(), run, record)
    return record


def add_slurm_job(run: RunDirectory, job_id: str) -> RunRecord:
    """Note a Slurm job of the run; noting it again changes nothing."""
    with _lock(run):
        record = read_record(run)
        if job_id not in record.slurm_job_ids:
            record = dataclasses.replace(record, slurm_job_ids=(*record.slurm_job_ids, job_id))
            write_record(Storage(), run, record)
    return record


@contextlib.contextmanager
def _lock(run: RunDirectory) -> Iterator[None]:
    """Keep others from changing the record between our reading and our writing it.

    A file made exclusively, which works on every network file system, unlike flock. The lock of a process that died
    is taken over after half a minute.
    """
    path = run.path / ".run.json.lock"
    deadline = time.monotonic() + _LOCK_WAIT_SECONDS
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            break
        except FileExistsError:
            if _is_stale(path):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            elif time.monotonic() > deadline:
                raise RunError(f"{path} has been held for long; remove it if no process of this run is alive") from None
            else:
                time.sleep(0.01)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _is_stale(lock: Path) -> bool:
    try:
        return time.time() - lock.stat().st_mtime > _LOCK_STALE_SECONDS
    except FileNotFoundError:
        return False


def _code_folder(spec: JobSpec) -> Path:
    """Where the user's code is, as far as the job file tells."""
    source = spec.script or (spec.task or "").rpartition(":")[0]
    return Path(source).parent if os.sep in str(source) else Path.cwd()


def _git_revision(folder: Path) -> str | None:
    import subprocess  # only where a run is made: most processes that use this module never do that

    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    import importlib.metadata  # slow to load, and only needed where a run is made

    versions = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
