"""Adopts orphaned jobs: notes what an interrupted submission left in the queue, before acting on a run or sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.jobs import read_known
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.status.orphaned_jobs import ask_about, with_orphaned_jobs
from cluster_ddp.run.status.sweep import read_known_elements
from cluster_ddp.run.sweep import Element, SlurmArray, SweepDirectory, read_sweep, update_sweep
from cluster_ddp.run.via import SBATCH
from cluster_ddp.submit.base import note_submitted


def adopt_run_jobs(run: RunDirectory, *, seconds: float) -> None:
    """Note the jobs of a run that are in the queue and whose submitter was killed before noting them.

    Raises
    ------
    SlurmError
        squeue is missing, or the controller does not answer in that time.
    """
    known = read_known(run)
    if known.orphaned is None or known.record is None:
        return
    (found,) = with_orphaned_jobs([known], ask_about([known], seconds=seconds))
    for job_id in found.found:
        add_slurm_job(run, job_id)
        note_submitted(run, known.record.via, job_id)


def adopt_sweep_jobs(sweep: SweepDirectory, *, seconds: float) -> None:
    """Note the array of a sweep that is in the queue, as `adopt_run_jobs` does with the jobs of a run."""
    record = read_sweep(sweep)
    if record.announced is None or record.busy:
        return
    known = read_known_elements(sweep, record, read_known)
    tasks: dict[str, list[Element]] = {}
    for element, entry in zip(
        record.elements, with_orphaned_jobs(known, ask_about(known, seconds=seconds)), strict=True
    ):
        for job_id in entry.found:
            tasks.setdefault(job_id.partition("_")[0], []).append(element)
    for job_id, elements in tasks.items():
        note_array(sweep, SlurmArray(job_id, record.announced), sweep.begun(elements))


def note_array(sweep: SweepDirectory, array: SlurmArray, begun: Sequence[Element]) -> None:
    """Note an array in the sweep, and its tasks in the runs of those elements that already have one."""
    update_sweep(sweep, lambda record: replace(record, arrays=(*record.arrays, array), announced=None))
    for element in begun:
        job_id = f"{array.job_id}_{element.number - array.offset}"
        add_slurm_job(sweep.run(element), job_id)
        note_submitted(sweep.run(element), SBATCH, job_id)
