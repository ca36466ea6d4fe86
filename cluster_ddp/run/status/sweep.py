"""The states of a sweep's elements, whether or not they have begun."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import resume_command
from cluster_ddp.run.jobs import KnownRun
from cluster_ddp.run.record import OrphanedJob, run_in_comment
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import RunStatus, RunSummary, describe_known
from cluster_ddp.run.status.starting import end_of_output
from cluster_ddp.run.status.waiting import how_to_release, in_words
from cluster_ddp.run.storage import owner_of
from cluster_ddp.run.sweep import Element, SweepDirectory, SweepRecord
from cluster_ddp.slurm.states import ACTIVE, WAITING, SlurmJob

TO_START = frozenset({RunState.FAILED, RunState.STALLED, RunState.LOST, RunState.STOPPED})
"""The states in which the same sweep command, or `resume` of the sweep, starts an element: not what was cancelled."""


K = TypeVar("K")


@dataclass(frozen=True)
class NotBegun:
    """An element that has no run yet; the counterpart of a `KnownRun`."""

    sweep: SweepDirectory
    record: SweepRecord
    element: Element
    # orphaned, found: as in `KnownRun`
    orphaned: OrphanedJob | None = None
    found: tuple[str, ...] = ()

    @property
    def slurm_job_ids(self) -> list[str]:
        """The tasks of Slurm arrays that may start it, the latest last."""
        number = self.element.number
        noted = [f"{array.job_id}_{number - array.offset}" for array in self.record.arrays if number >= array.offset]
        return [*noted, *self.found]


def read_known_elements(
    sweep: SweepDirectory, record: SweepRecord, read_run: Callable[[RunDirectory], K]
) -> list[K | NotBegun]:
    """Read what to query squeue for, for the elements of a sweep in order.

    Parameters
    ----------
    read_run
        Does so for an element that has a run: `cluster_ddp.run.jobs.read_known`, or a function that uses a cache.
    """
    begun = {element.name for element in sweep.begun(record.elements)}
    offset = None if record.busy else record.announced
    noted = frozenset(array.job_id for array in record.arrays)

    def known(element: Element) -> K | NotBegun:
        orphaned = None
        if offset is not None and element.number >= offset:
            orphaned = OrphanedJob(frozenset({record.id}), element.number - offset, noted)
        if element.name not in begun:
            return NotBegun(sweep, record, element, orphaned)
        run = read_run(sweep.run(element))
        return replace(run, orphaned=orphaned, withdrawn=record.withdrawn) if isinstance(run, KnownRun) else run

    return [known(element) for element in record.elements]


def tasks_of(known: NotBegun, slurm_jobs: Mapping[str, SlurmJob]) -> list[SlurmJob]:
    """Return the tasks of the sweep's arrays that were to start an element and that Slurm knows, the latest last."""
    tasks = [slurm_jobs[job_id] for job_id in known.slurm_job_ids if job_id in slurm_jobs]
    return [task for task in tasks if _is_of(known, task)]


def _is_of(known: NotBegun, task: SlurmJob) -> bool:
    """Whether a job is the noted one, and not another to which Slurm has given its id.

    Where the site replaces comments, it must belong to the sweep's owner and have the name that it was submitted with.
    """
    named = run_in_comment(task.comment)
    if named is not None:
        return named == known.record.id
    is_owners = task.owner is not None and task.owner == owner_of(known.sweep.record_file)
    return is_owners and task.name == known.record.id.rpartition("-sweep-")[0]


def describe_element(known: KnownRun | NotBegun, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunStatus:
    """Return the status of an element, or of any run; see `cluster_ddp.run.status.report.describe`."""
    if isinstance(known, KnownRun):
        return describe_known(known, slurm_jobs)
    element, run = known.element, known.sweep.run(known.element)
    tasks = tasks_of(known, slurm_jobs or {})
    job = tasks[-1] if tasks else None
    state, reason = _state(known.sweep, known.record, job, answered=slurm_jobs is not None)
    empty = describe_known(KnownRun(run, None, None, ()), None)
    return replace(empty, name=element.name, state=state, reason=reason, slurm_job_id=job.job_id if job else None)


def _state(
    sweep: SweepDirectory, record: SweepRecord, job: SlurmJob | None, *, answered: bool
) -> tuple[RunState, str | None]:
    if job is None:
        if record.busy:
            return RunState.PENDING, "waits for its turn"
        if (record.arrays or record.announced is not None) and not answered:
            return RunState.PENDING, "Slurm cannot be queried about it from here"
        return RunState.LOST, f"has not started, and no job will start it; {resume_command(record.id)} does"
    if job.held:
        return RunState.HELD, how_to_release(job)
    if job.state in WAITING:
        return RunState.PENDING, in_words(job.reason)
    if job.state in ACTIVE:
        return RunState.RUNNING, "starting"
    if job.is_cancelled:
        return (
            RunState.LOST,
            f"job {job.job_id} was cancelled before it started; {resume_command(record.id)} starts it",
        )
    array = job.job_id.partition("_")[0]
    if array in record.withdrawn:
        return (
            RunState.LOST,
            f"the sweep was stopped or cancelled before it started; {resume_command(record.id)} starts it",
        )
    output = f"slurm-{array}.out"
    said = end_of_output(sweep.path / output, f"{output} of the sweep")
    return RunState.LOST, f"Slurm job {job.job_id} ended as {job.state} before an attempt started ({said})"


# The state of a sweep as a whole: the first of these that any element is in.
_AS_A_WHOLE = (
    RunState.RUNNING,
    RunState.SUSPENDED,
    RunState.REQUEUED,
    RunState.PENDING,
    RunState.HELD,
    RunState.FAILED,
    RunState.STALLED,
    RunState.LOST,
    RunState.STOPPED,
    RunState.CANCELLED,
    RunState.COMPLETED,
)


@dataclass(frozen=True)
class SweepCounts:
    """How many elements of a sweep are in which state."""

    sweep: SweepDirectory
    states: dict[RunState, int]
    wrong: str | None  # why it cannot be read

    @classmethod
    def of(cls, sweep: SweepDirectory, found: Sequence[RunSummary], wrong: str | None) -> SweepCounts:
        """Count the states of a sweep's elements."""
        counted = Counter(status.state for status in found)
        return cls(sweep, {state: counted[state] for state in _AS_A_WHOLE if counted[state]}, wrong)

    def in_words(self) -> str:
        """The counts for people."""
        if self.wrong is not None:
            return self.wrong
        total = sum(self.states.values())
        told = ", ".join(f"{count} {state.value}" for state, count in self.states.items())
        return f"{total} element{'s' if total != 1 else ''}: {told}"

    @property
    def open(self) -> bool:
        """Whether any element will change by itself."""
        return any(state.open for state in self.states)

    def as_run(self) -> RunStatus:
        """Represent the sweep as one run, as far as possible, for lists of runs."""
        empty = describe_known(KnownRun(RunDirectory(self.sweep.path), None, None, ()), None)
        state = next(iter(self.states), RunState.LOST)
        return replace(empty, name=self.sweep.id, state=state, reason=self.in_words())

    def to_json(self) -> dict[str, int]:
        """Return the counts by state."""
        return {state.value: count for state, count in self.states.items()}


def best_of(found: Sequence[RunStatus], record: SweepRecord) -> tuple[RunStatus, str] | None:
    """Return the best element by its latest value of a metric, and the metric; None until one has been measured.

    The metric is that of ``checkpoint.keep_best``; else the lowest validation loss, else the lowest training loss.
    """
    candidates = [(record.metric, record.mode)] if record.metric else [("val/loss", "min"), ("train/loss", "min")]
    for metric, mode in candidates:
        measured = [status for status in found if math.isfinite(status.metrics.get(metric, math.nan))]
        if measured:
            best = max if mode == "max" else min
            return best(measured, key=lambda status: status.metrics[metric]), metric
    return None
