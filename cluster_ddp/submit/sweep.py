"""Sweeps: many runs of one job that differ in a few settings, as one job array.

Preparing a sweep makes a folder and a few files, however many elements it has; each element makes its run when it
starts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster_ddp.process import limit_umask
from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.errors import RunError, to_continue
from cluster_ddp.run.events import caller
from cluster_ddp.run.history import read_history
from cluster_ddp.run.jobs import read_known
from cluster_ddp.run.record import slurm_comment
from cluster_ddp.run.runs import keep_script, runs_dir_of, share_with_group
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.status.sweep import TO_START, describe_element, read_known_elements
from cluster_ddp.run.storage import Storage, replace_file
from cluster_ddp.run.sweep import (
    Element,
    Settings,
    SlurmArray,
    SweepDirectory,
    SweepRecord,
    change_sweep,
    claimed,
    read_sweep,
    update_sweep,
    with_elements,
    withdraw,
)
from cluster_ddp.run.via import SBATCH
from cluster_ddp.slurm.commands import cancel_job, query_jobs, require, submit_script
from cluster_ddp.slurm.control import max_array_size
from cluster_ddp.submit.adopting import adopt_sweep_jobs, note_array
from cluster_ddp.submit.base import check_writable
from cluster_ddp.submit.refused import advised
from cluster_ddp.submit.script import BatchScript, check_before_sending, own_comment, render_script

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, LoadedJob

_TRAINED = ("name", "task", "params", "script", "args", "train")
"""The keys of a job that identify its sweep; what is asked of Slurm, for example, may change later."""

_QUEUE_SECONDS = 100.0


@dataclass(frozen=True)
class SweepPlan:
    """A sweep, ready to be started: what a dry run prints and what is submitted."""

    sweep: SweepDirectory
    elements: tuple[Settings, ...]
    job: dict[str, Any]  # without the settings that differ
    first: LoadedJob  # the first element; all request the same from Slurm
    specs: tuple[JobSpec, ...]  # of all elements
    script: BatchScript
    remarks: tuple[str, ...]

    @property
    def spec(self) -> JobSpec:
        """The job of the first element."""
        return self.first.spec


def plan_sweep(
    job: str,
    settings: Sequence[str],
    elements: Sequence[Settings],
    *,
    check_target: bool,
    at_first: Callable[[JobSpec], None] | None = None,
) -> SweepPlan:
    """Check every element of a sweep, and render the script that starts them; nothing is written.

    Parameters
    ----------
    at_first
        Called with the first valid element, before the others are checked.

    Raises
    ------
    ClusterDDPError
        Something is wrong with the job or with an element, which the message names.
    """
    from cluster_ddp.job import load_variants

    variants = load_variants(job, settings, elements, check_target=check_target, at_first=at_first)
    spec = variants.first.spec
    script = render_script(spec, sweep=True, exported=os.environ)
    trained = json.dumps({key: variants.job.get(key) for key in _TRAINED}, sort_keys=True)
    name = f"{spec.name}-sweep-{hashlib.sha256(trained.encode()).hexdigest()[:8]}"
    remarks = (*variants.first.warnings, *script.remarks)
    sweep = SweepDirectory(runs_dir_of(spec) / name)
    return SweepPlan(sweep, tuple(elements), variants.job, variants.first, variants.specs, script, remarks)


def planned_before(sweep: SweepDirectory) -> SweepPlan:
    """Return a sweep as it was last planned, from its folder; nothing is written.

    Raises
    ------
    ClusterDDPError
        The folder does not contain what a sweep wrote there, or an element is no longer valid.
    """
    from cluster_ddp.job import load_stored_variants

    elements = tuple(element.settings for element in read_sweep(sweep).elements)
    variants = load_stored_variants(sweep.job_file, elements)
    script = render_script(variants.first.spec, sweep=True, exported=os.environ)
    return SweepPlan(sweep, elements, variants.job, variants.first, variants.specs, script, script.remarks)


def prepare(plan: SweepPlan, via: str, at_once: int | None) -> SweepRecord:
    """Make the folder of a sweep, or add new elements, and claim it, so that nobody else starts its elements meanwhile.

    Parameters
    ----------
    via
        How its elements are started, the same for all of them.
    at_once
        How many may run at the same time; None for no limit.
    """
    from cluster_ddp.job.document import dump

    sweep, storage = plan.sweep, Storage()
    check_writable(sweep.path.parent)
    try:
        limit_umask()
        sweep.path.mkdir(parents=True, exist_ok=True)
        if plan.spec.storage.mode == "group":
            share_with_group(sweep.path)
        limit_umask(sweep.path)
        record = change_sweep(sweep, lambda before: _claimed(plan, before, via, at_once))
        replace_file(storage, sweep.job_file, dump(plan.job).encode())
        keep_script(storage, sweep.script, plan.script.text, mode=0o700)
    except OSError as error:
        raise RunError(f"the sweep cannot be made in {sweep.path}: {error}") from error
    return record


def _claimed(plan: SweepPlan, before: SweepRecord | None, via: str, at_once: int | None) -> SweepRecord:
    if before is not None and before.via != via:
        raise RunError(
            f"sweep {before.id} was started via {before.via}, and its runs can only continue that way.\n"
            f"For another one: --set name=... or --set runs_dir=..."
        )
    record = replace(claimed(with_elements(plan.sweep, before, plan.elements)), via=via, at_once=at_once)
    best = plan.spec.checkpoint.keep_best
    return replace(record, metric=best.metric, mode=best.mode) if best is not None else record


def release(sweep: SweepDirectory, claim: SweepRecord) -> None:
    """Release the claim, so that others can start elements of the sweep, unless somebody else has the claim by now."""
    update_sweep(
        sweep, lambda record: replace(record, submitting=None) if record.submitting == claim.submitting else record
    )


@dataclass(frozen=True)
class Submitted:
    """What a call has queued."""

    job_ids: tuple[str, ...]  # of the arrays
    started: int
    found: tuple[RunStatus, ...]  # the elements' states before


def submit_sweep(plan: SweepPlan, *, at_once: int | None) -> Submitted:
    """Submit the elements of a sweep that are missing or unfinished.

    Parameters
    ----------
    at_once
        How many may run at the same time; None for no limit.

    Raises
    ------
    ClusterDDPError
        A check failed, a different process is submitting the sweep, or Slurm refuses or cannot be queried. Arrays that
        were submitted before stay in the queue, and the same command submits the rest.
    """
    require("sbatch")
    check_before_sending(plan.spec)
    if plan.sweep.exists():
        adopt_sweep_jobs(plan.sweep, seconds=_QUEUE_SECONDS)
    record = prepare(plan, SBATCH, at_once)
    try:
        found = element_states(plan.sweep)
        numbers = [number for number, status in enumerate(found) if status.state in TO_START]
        begun = {element.number: element for element in plan.sweep.begun([record.elements[n] for n in numbers])}
        for element in begun.values():
            resume_element(plan.sweep, element)
        job_ids: list[str] = []
        for offset, tasks in arrays_of(numbers, max_array_size()):
            after = job_ids[-1] if job_ids and at_once is not None else None
            options = _options(plan, _ranges(tasks), at_once, after)
            _announce(plan.sweep, offset)
            with advised():
                job_id = submit_script(plan.sweep.script, str(plan.sweep.path), str(offset), options=options)
            job_ids.append(job_id)
            elements = (begun.get(offset + task) for task in tasks)
            note_array(plan.sweep, SlurmArray(job_id, offset), [element for element in elements if element is not None])
            _withdraw_unless_claimed(plan.sweep, record, job_id)
    finally:
        release(plan.sweep, record)
    return Submitted(tuple(job_ids), len(numbers), tuple(found))


def _withdraw_unless_claimed(sweep: SweepDirectory, claim: SweepRecord, job_id: str) -> None:
    """Remove an array from the queue if `stop` or `cancel` has taken the claim before the array was noted."""
    if read_sweep(sweep).submitting == claim.submitting:
        return
    update_sweep(sweep, lambda record: withdraw(record, [job_id]))
    cancel_job(job_id)
    raise RunError(
        f"sweep {sweep.id} was stopped or cancelled while it was being submitted; its Slurm job {job_id} has been "
        f"taken back out of the queue.\n{to_continue(sweep.id)}"
    )


def element_states(sweep: SweepDirectory) -> list[RunStatus]:
    """Determine the states of the elements of a sweep claimed by this process; raises `SlurmError` if unanswered."""
    record = replace(read_sweep(sweep), submitting=None)
    known = read_known_elements(sweep, record, read_known)
    jobs = query_jobs(job_id for element in known for job_id in element.slurm_job_ids)
    return [describe_element(element, jobs) for element in known]


def resume_element(sweep: SweepDirectory, element: Element) -> None:
    """Request that the run of an element, which has ended, continue when the element is started again."""
    run = sweep.run(element)
    run.refuse_links()
    request_resume(run, by=caller(), seen=read_history(run))


def arrays_of(numbers: Sequence[int], size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield arrays for some elements: the element that is task 0, and the tasks, all of them below `size`."""
    for offset in range(0, max(numbers, default=-1) + 1, size):
        tasks = [number - offset for number in numbers if offset <= number < offset + size]
        if tasks:
            yield offset, tasks


def _options(plan: SweepPlan, tasks: str, at_once: int | None, after: str | None) -> list[str]:
    """Return the sbatch options that belong to a sweep and so cannot be in the script.

    If the number of elements that may run at once is limited, each array waits for the previous one.
    """
    options = [
        f"--array={tasks}" + (f"%{at_once}" if at_once is not None else ""),
        # For output before the run of an element exists. In sbatch's file patterns % begins a replacement.
        f"--output={str(plan.sweep.path).replace('%', '%%')}/slurm-%A.out",
        f"--comment={slurm_comment(plan.sweep.id)}{own_comment(plan.spec)}",
    ]
    return [*options, f"--dependency=afterany:{after}"] if after else options


def _announce(sweep: SweepDirectory, offset: int) -> None:
    """Record which array is submitted next, in case this process is killed before it notes the array."""
    update_sweep(sweep, lambda record: replace(record, announced=offset))


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers for sbatch: ``0-4,7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
