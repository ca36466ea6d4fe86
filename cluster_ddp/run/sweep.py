"""A sweep on shared storage: a folder with one `sweep.json`, and the runs of its elements inside.

    <runs_dir>/<name>-sweep-<8 hex>/
      sweep.json         the elements with their settings, and the Slurm arrays that were submitted for them
      job.yaml           the job without the settings that differ
      job.sbatch         the script of the arrays; also that of each run, used to resume it
      0003-lr=1e-3/      a run, from the first start of its element on

The same job with the same grid gets the same folder, so that the same command finds what already exists.
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
from cluster_ddp.printing import say_if_storage_is_slow
from cluster_ddp.run.directory import SWEEP_RECORD, Inside, RunDirectory, copied_from
from cluster_ddp.run.errors import RunError, RunNotFound
from cluster_ddp.run.liveness import claim, is_claimed
from cluster_ddp.run.lock import change_file
from cluster_ddp.run.reading import as_time, as_whole, read_file
from cluster_ddp.run.runs import list_runs
from cluster_ddp.run.storage import Storage, json_bytes
from cluster_ddp.run.via import LOCAL, SBATCH
from cluster_ddp.slurm.states import is_job_id

Settings = tuple[str, ...]  # each of the form KEY=VALUE
_MAX_LABEL = 120  # characters for the differing settings in a name
_MAX_BYTES = 32 << 20  # of sweep.json
_MAX_TASKS = 1_000 * MAX_ELEMENTS  # of all arrays together, of which a submission may need ten (MaxArraySize)
_NAME = re.compile(r"[0-9]{4,}-[A-Za-z0-9._+=-]{1,200}")


@dataclass(frozen=True)
class Element:
    """One job of a sweep."""

    name: str  # of its run's folder: its number and its differing settings
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
    """The contents of `sweep.json`."""

    id: str
    created: float  # Unix seconds
    elements: tuple[Element, ...]
    via: str = SBATCH  # how its runs are started: SBATCH or LOCAL
    arrays: tuple[SlurmArray, ...] = ()
    metric: str | None = None  # decides which element is the best: that of checkpoint.keep_best
    mode: str = "max"
    at_once: int | None = None  # how many may run at the same time; None for no limit
    submitting: dict[str, Any] | None = None  # the process that is submitting or running elements, and since when
    announced: int | None = None  # first element of an array that was passed to sbatch and is not noted yet
    withdrawn: tuple[str, ...] = ()  # the arrays that must not start any further elements
    directory: str | None = None  # where the sweep was made; None in records of older versions

    @property
    def busy(self) -> bool:
        """Whether a different process is submitting elements, or running them here."""
        return is_claimed(self.submitting)


@dataclass(frozen=True)
class SweepDirectory:
    """A sweep's folder on shared storage and the paths in it."""

    path: Path

    record_file = Inside(SWEEP_RECORD)
    job_file = Inside("job.yaml")
    script = Inside("job.sbatch")

    @property
    def id(self) -> str:
        return self.path.name

    def exists(self) -> bool:
        """Whether this folder contains a sweep, even one whose record cannot be read."""
        return os.path.lexists(self.record_file)

    def run(self, element: Element) -> RunDirectory:
        """Return the run of an element, whether or not it exists."""
        return RunDirectory(self.path / element.name)

    def begun(self, elements: Sequence[Element]) -> list[Element]:
        """Return those of the elements that have a run."""
        try:
            names = set(os.listdir(self.path))
        except OSError:
            return []
        return [element for element in elements if element.name in names and self.run(element).exists()]


def read_sweep(sweep: SweepDirectory) -> SweepRecord:
    """Read the record of a sweep; raises `RunError` if it cannot be read or was not written by this package."""
    try:
        value = json.loads(read_file(sweep.record_file, _MAX_BYTES))
        return _checked(value)
    except FileNotFoundError:
        raise RunNotFound(f"{sweep.path} is not a sweep: it has no {SWEEP_RECORD}") from None
    except OSError as error:
        raise RunError(f"{sweep.record_file} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{sweep.record_file} cannot be read: it was not written by cluster_ddp, or is damaged ({error}). Move it "
            "away and run the sweep command again: it finds the existing runs"
        ) from error


def change_sweep(sweep: SweepDirectory, change: Callable[[SweepRecord | None], SweepRecord]) -> SweepRecord:
    """Change or create the record of a sweep while nobody else does; return the new one.

    Raises
    ------
    RunError
        It is a copy: its jobs are its original's, and nothing is done with it as a whole.
    """
    after: SweepRecord | None = None

    def content() -> bytes:
        nonlocal after
        before = read_sweep(sweep) if sweep.exists() else None
        original = copied_from(sweep.record_file, before.directory) if before is not None else None
        if original is not None:
            raise RunError(
                f"{sweep.path} is a copy of sweep {original}, whose Slurm jobs are not the copy's. Name the original, "
                "or the directory of a run in the copy"
            )
        after = change(before)
        return json_bytes(asdict(after))

    change_file(Storage(), sweep.record_file, content)
    assert after is not None
    return after


def update_sweep(sweep: SweepDirectory, change: Callable[[SweepRecord], SweepRecord]) -> None:
    """Change the record of a sweep that exists, as `change_sweep` does; raises `RunNotFound` if it has vanished."""
    change_sweep(sweep, lambda record: change(record or read_sweep(sweep)))


def with_elements(sweep: SweepDirectory, record: SweepRecord | None, wanted: Sequence[Settings]) -> SweepRecord:
    """Return the record with these elements added; existing ones keep their numbers."""
    from cluster_ddp.job.grid import identity, labels  # loads YAML, which is not needed to show a sweep

    record = record or SweepRecord(sweep.id, time.time(), (), directory=str(sweep.path.absolute()))
    known = {identity(element.settings) for element in record.elements}
    new = [settings for settings in wanted if identity(settings) not in known]
    first = len(record.elements)
    if first + len(new) > MAX_ELEMENTS:
        raise RunError(
            f"sweep {sweep.id} would have {first + len(new):,} elements, but at most {MAX_ELEMENTS:,} are allowed"
        )
    names = labels([*(element.settings for element in record.elements), *new])[first:]
    added = [
        Element(f"{number:04d}-{label[:_MAX_LABEL] or 'as-it-is'}", settings)
        for number, label, settings in zip(range(first, first + len(new)), names, new, strict=True)
    ]
    return replace(record, elements=(*record.elements, *added))


def claimed(record: SweepRecord) -> SweepRecord:
    """Return the record with this process as its submitter; raises `RunError` while a different process submits it.

    What a killed submitter was about to submit is forgotten: the caller has adopted it before.
    """
    if record.busy:
        who = record.submitting or {}
        does, end = "submitted", ""
        if record.via == LOCAL:
            does, end = "run", f"\nTo end that, also if {who['host']} is down: cluster-ddp stop {record.id}"
        raise RunError(
            f"sweep {record.id} is being {does} by process {who['pid']} on {who['host']}, and cannot be started "
            f"twice.\nTo see its progress: cluster-ddp status {record.id}{end}"
        )
    return replace(record, submitting=claim(), announced=None)


def withdraw(record: SweepRecord, job_ids: Iterable[str]) -> SweepRecord:
    """Return the record with these arrays withdrawn, so that they start no further elements.

    They may still be in the queue: Slurm's controller may be away when they are to be removed.
    """
    return replace(record, withdrawn=tuple(dict.fromkeys((*record.withdrawn, *job_ids))))


@say_if_storage_is_slow
def find_sweep(name: str, runs_dir: Path) -> SweepDirectory | None:
    """Return the sweep that `name` identifies: its folder, its id, or a unique prefix that no run's id begins with."""
    if not name.strip():
        return None
    path = SweepDirectory(Path(os.path.expanduser(name)).absolute())
    if path.exists():
        return path
    if os.sep in name:
        return None
    found = [sweep for sweep in list_sweeps(runs_dir) if sweep.id.startswith(name)]
    exact = [sweep for sweep in found if sweep.id == name]
    if exact:
        return exact[0]
    return found[0] if len(found) == 1 and not any(run.id.startswith(name) for run in list_runs(runs_dir)) else None


def list_sweeps(folder: Path) -> list[SweepDirectory]:
    """List the sweeps in a folder by name; empty if the folder does not exist or cannot be read."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
    return [sweep for sweep in map(SweepDirectory, entries) if sweep.exists()]


def runs_in(sweep: SweepDirectory) -> list[RunDirectory]:
    """List the runs of elements that have begun, none through a link; raises `RunError` if the sweep cannot be read."""
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
        raise ValueError("id, created or metric has a value that cluster_ddp never writes")
    if at_once is not None and not as_whole(at_once):
        raise ValueError("at_once is not a number of elements")
    announced = value.get("announced")
    if announced is not None and as_whole(announced) is None:
        raise ValueError("announced is not the number of an element")
    directory = value.get("directory") if isinstance(value.get("directory"), str) else None
    withdrawn = tuple(filter(is_job_id, map(str, value.get("withdrawn") or ())))
    return SweepRecord(
        value["id"], created, elements, str(value["via"]), arrays, metric, str(mode), at_once, submitting, announced,
        withdrawn, directory,
    )  # fmt: skip
