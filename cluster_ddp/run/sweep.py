"""A sweep on shared storage: a folder with one `sweep.json`, and the runs of its elements inside.

    <runs_dir>/<name>-sweep-<8 hex>/
      sweep.json         the elements with their settings, and the Slurm arrays that were submitted for them
      job.yaml           the job without what differs
      job.sbatch         the script of the arrays; also that of each run, by which it is resumed
      0003-lr=1e-3/      a run, from the first start of its element on

The same job and the same grid get the same folder, so that the same command finds what exists already.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster_ddp.job.elements import MAX_ELEMENTS
from cluster_ddp.run.directory import SWEEP_RECORD, RunDirectory
from cluster_ddp.run.errors import RunError, RunNotFound
from cluster_ddp.run.liveness import claim, is_claimed
from cluster_ddp.run.lock import change_file
from cluster_ddp.run.reading import as_time, as_whole, read_file
from cluster_ddp.run.runs import list_runs
from cluster_ddp.run.storage import Storage, json_bytes
from cluster_ddp.run.via import SBATCH
from cluster_ddp.slurm.states import is_job_id

Settings = tuple[str, ...]  # of the form KEY=VALUE
_MAX_LABEL = 120  # characters of what differs, in a name
_MAX_BYTES = 32 << 20  # of sweep.json
_MAX_TASKS = 100 * MAX_ELEMENTS  # of all arrays: each may be to start every element
_NAME = re.compile(r"[0-9]{4,}-[A-Za-z0-9._+=-]{1,200}")


@dataclass(frozen=True)
class Element:
    """One job of a sweep."""

    name: str  # of its run's folder: its number and what differs
    settings: Settings

    @property
    def number(self) -> int:
        return int(self.name.partition("-")[0])


@dataclass(frozen=True)
class SlurmArray:
    """A job array that was submitted for a sweep."""

    job_id: str
    offset: int  # the element that is task 0 of the array


@dataclass(frozen=True)
class SweepRecord:
    """What `sweep.json` holds."""

    id: str
    created: float  # Unix seconds
    elements: tuple[Element, ...]
    via: str = SBATCH  # how its runs are started; else LOCAL
    arrays: tuple[SlurmArray, ...] = ()
    metric: str | None = None  # by which an element is the best: that of checkpoint.keep_best
    mode: str = "max"
    at_once: int | None = None  # how many may run at the same time; None for no limit
    submitting: dict[str, Any] | None = None  # the process that is submitting or running elements, and since when
    announced: int | None = None  # the element that is task 0 of an array that was given to sbatch and is not noted yet
    withdrawn: tuple[str, ...] = ()  # the arrays by which no element is to begin any more

    @property
    def busy(self) -> bool:
        """Whether another process is submitting elements, or running them here."""
        return is_claimed(self.submitting)


@dataclass(frozen=True)
class SweepDirectory:
    """A sweep's folder on shared storage and the names in it."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def record_file(self) -> Path:
        return self.path / SWEEP_RECORD

    @property
    def job_file(self) -> Path:
        return self.path / "job.yaml"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    def exists(self) -> bool:
        """Whether this folder holds a sweep; one whose record cannot be read is a sweep, too."""
        return os.path.lexists(self.record_file)

    def run(self, element: Element) -> RunDirectory:
        """The run of an element, whether it exists or not."""
        return RunDirectory(self.path / element.name)

    def begun(self, elements: Sequence[Element]) -> list[Element]:
        """Those of the elements that have a run."""
        try:
            names = set(os.listdir(self.path))  # noqa: PTH208 - only the names are wanted
        except OSError:
            return []
        return [element for element in elements if element.name in names and self.run(element).exists()]


def read_sweep(sweep: SweepDirectory) -> SweepRecord:
    """The record of a sweep; a `RunError` when it cannot be read or is not what this package wrote."""
    try:
        value = json.loads(read_file(sweep.record_file, _MAX_BYTES))
        return _checked(value)
    except FileNotFoundError:
        raise RunNotFound(f"{sweep.path} is not a sweep: it has no {SWEEP_RECORD}") from None
    except OSError as error:
        raise RunError(f"{sweep.record_file} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{sweep.record_file} cannot be read: it is not what cluster_ddp writes ({error}). Move it away and run "
            "the sweep command again: it finds the existing runs"
        ) from error


def change_sweep(sweep: SweepDirectory, change: Callable[[SweepRecord | None], SweepRecord]) -> SweepRecord:
    """Change the record of a sweep, or make it, while nobody else does; the new one."""
    after: SweepRecord | None = None

    def content() -> bytes:
        nonlocal after
        after = change(read_sweep(sweep) if sweep.exists() else None)
        return json_bytes(asdict(after))

    change_file(Storage(), sweep.record_file, content)
    assert after is not None
    return after


def with_elements(sweep: SweepDirectory, record: SweepRecord | None, wanted: Sequence[Settings]) -> SweepRecord:
    """The record with these elements added; existing ones keep their numbers."""
    from cluster_ddp.job.grid import identity, labels  # loads YAML, which showing a sweep does not need

    record = record or SweepRecord(sweep.id, time.time(), ())
    known = {identity(element.settings) for element in record.elements}
    new = [settings for settings in wanted if identity(settings) not in known]
    first = len(record.elements)
    if first + len(new) > MAX_ELEMENTS:
        raise RunError(f"sweep {sweep.id} would have {first + len(new):,} elements; allowed are {MAX_ELEMENTS:,}")
    names = labels([*(element.settings for element in record.elements), *new])[first:]
    added = [
        Element(f"{number:04d}-{label[:_MAX_LABEL] or 'as-it-is'}", settings)
        for number, label, settings in zip(range(first, first + len(new)), names, new, strict=True)
    ]
    return replace(record, elements=(*record.elements, *added))


def claimed(record: SweepRecord) -> SweepRecord:
    """The record with this process as its submitter; a `RunError` while another process submits it.

    What another was about to submit when it was killed is forgotten: whoever claims the sweep has taken that up before.
    """
    if record.busy:
        who = record.submitting or {}
        raise RunError(
            f"sweep {record.id} is being submitted by process {who['pid']} on {who['host']}, and cannot be started "
            f"twice.\nSee how it goes on: cluster-ddp status {record.id}"
        )
    return replace(record, submitting=claim(), announced=None)


def withdraw(record: SweepRecord, job_ids: Iterable[str]) -> SweepRecord:
    """The record by which no element begins that is to be started by one of these arrays.

    They may be in the queue still: Slurm's controller may be away when they are to leave it.
    """
    return replace(record, withdrawn=tuple(dict.fromkeys((*record.withdrawn, *job_ids))))


def find_sweep(text: str, runs_dir: Path) -> SweepDirectory | None:
    """The sweep that `text` names: its folder, its id, or a unique prefix of one that no run's id begins with."""
    if not text.strip():
        return None
    path = SweepDirectory(Path(os.path.expanduser(text)).absolute())  # noqa: PTH111 - Path.expanduser raises
    if path.exists():
        return path
    if os.sep in text:
        return None
    found = [sweep for sweep in list_sweeps(runs_dir) if sweep.id.startswith(text)]
    exact = [sweep for sweep in found if sweep.id == text]
    if exact:
        return exact[0]
    return found[0] if len(found) == 1 and not any(run.id.startswith(text) for run in list_runs(runs_dir)) else None


def list_sweeps(folder: Path) -> list[SweepDirectory]:
    """The sweeps in a folder, by name; none when the folder does not exist."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
    return [sweep for sweep in map(SweepDirectory, entries) if sweep.exists()]


def runs_in(sweep: SweepDirectory) -> list[RunDirectory]:
    """The runs of the elements that have begun, none through a link; a `RunError` when the sweep cannot be read."""
    runs = [sweep.run(element) for element in sweep.begun(read_sweep(sweep).elements)]
    return [run for run in runs if not run.path.is_symlink()]


def _checked(value: dict[str, Any]) -> SweepRecord:
    elements = tuple(Element(entry["name"], tuple(entry["settings"])) for entry in value["elements"])
    arrays = tuple(SlurmArray(entry["job_id"], entry["offset"]) for entry in value["arrays"])
    if len(elements) > MAX_ELEMENTS or len(elements) * len(arrays) > _MAX_TASKS:
        raise ValueError(f"{len(elements):,} elements and {len(arrays):,} arrays are too many")
    for number, element in enumerate(elements):
        if not _NAME.fullmatch(element.name) or element.number != number:
            raise ValueError(f"{element.name!r} is not the name of element {number}")
        if not all(isinstance(setting, str) for setting in element.settings):
            raise ValueError(f"element {number} has a setting that is not a string")
    for array in arrays:
        if not is_job_id(array.job_id) or not array.job_id.isdigit() or as_whole(array.offset) is None:
            raise ValueError("an array is not a Slurm job array")
    submitting = value.get("submitting") if isinstance(value.get("submitting"), dict) else None
    created = as_time(value["created"])
    metric, mode, at_once = value.get("metric"), value.get("mode", "max"), value.get("at_once")
    if not isinstance(value["id"], str) or created is None or not isinstance(metric, str | None):
        raise ValueError("the value of its id, its time of creation or its metric")
    if at_once is not None and not as_whole(at_once):
        raise ValueError("at_once is not a number of elements")
    announced = value.get("announced")
    if announced is not None and as_whole(announced) is None:
        raise ValueError("announced is not the number of an element")
    withdrawn = tuple(filter(is_job_id, map(str, value.get("withdrawn") or ())))
    return SweepRecord(
        value["id"], created, elements, str(value["via"]), arrays, metric, str(mode), at_once, submitting, announced,
        withdrawn,
    )  # fmt: skip
