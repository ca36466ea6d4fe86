"""What ``stop`` and ``cancel`` do with a sweep: end all its elements, with one call of squeue and few of scancel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster_ddp.cli.output import inform
from cluster_ddp.cli.run_states import SLURM_SECONDS
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.process import limit_umask
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError, resume_command
from cluster_ddp.run.history import read_history
from cluster_ddp.run.jobs import KnownRun, living_jobs, read_known
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.status.sweep import NotBegun, describe_element, read_known_elements, tasks_of
from cluster_ddp.run.sweep import SweepDirectory, SweepRecord, read_sweep, update_sweep, withdraw
from cluster_ddp.slurm.commands import SlurmError, cancel_job, query_jobs
from cluster_ddp.slurm.states import ACTIVE, WAITING, SlurmJob
from cluster_ddp.submit.adopting import adopt_sweep_jobs


def stop_sweep(sweep: SweepDirectory, ask_to_stop: Callable[[RunDirectory, RunStatus], object]) -> None:
    """Have the elements that train save and end, and take those that wait out of the queue.

    Parameters
    ----------
    ask_to_stop
        Asks one run that is alive, or waits to continue, to stop.

    Raises
    ------
    RunError
        Nothing of the sweep is alive or waiting.
    """
    started_here = _start_no_more(sweep)
    looked = _look(sweep)
    waiting = [job.job_id for _, _, jobs in looked for job in jobs if job.state in WAITING]
    starting = [
        job.job_id for known, _, jobs in looked if isinstance(known, NotBegun) for job in jobs if job.state in ACTIVE
    ]
    _cancel(sweep, waiting, only_waiting=True)
    _cancel(sweep, starting)  # it has no run yet, and so nothing to save
    asked = [
        status.state.alive
        for known, status, _ in looked
        if isinstance(known, KnownRun) and _can_stop(known.run, status)
        if _try(functools.partial(ask_to_stop, known.run, status))
    ]
    if not asked and not waiting and not starting and not started_here:
        raise RunError(f"sweep {sweep.id}: none of its elements is running or waiting, so there is nothing to stop")
    inform(
        f"sweep {sweep.id}: {sum(asked)} element{'s' * (sum(asked) != 1)} asked to save and exit, "
        f"{len(waiting) + len(starting)} removed from the queue "
        f"(see: cluster-ddp status {sweep.id}; continue later: {resume_command(sweep.id)})"
    )


def cancel_sweep(sweep: SweepDirectory, mark: Callable[[RunDirectory], None]) -> None:
    """End all elements that are not complete, for good.

    Parameters
    ----------
    mark
        Notes in one run that it is cancelled, if it is not complete; from then on it begins no attempt.
    """
    _start_no_more(sweep)
    for element in sweep.begun(read_sweep(sweep).elements):
        _try(functools.partial(mark, sweep.run(element)))
    living = [job.job_id for _, _, jobs in _look(sweep) for job in jobs]
    _cancel(sweep, living)
    inform(
        f"cancelled sweep {sweep.id}, including {len(living)} of its Slurm jobs (to start a run again: "
        "cluster-ddp resume DIRECTORY)"
    )


def _look(sweep: SweepDirectory) -> list[tuple[KnownRun | NotBegun, RunStatus, Sequence[SlurmJob]]]:
    """Each element, where it stands, and those of its jobs that wait or run and are certainly its own."""
    limit_umask(sweep.path)
    try:
        adopt_sweep_jobs(sweep, seconds=SLURM_SECONDS)
        known = read_known_elements(sweep, read_sweep(sweep), read_known)
        job_ids = {job_id for element in known for job_id in element.slurm_job_ids}
        jobs = query_jobs(job_ids, seconds=SLURM_SECONDS) if job_ids else {}
    except SlurmError as error:
        raise _may_go_on(sweep, error) from error
    return [(element, describe_element(element, jobs), _living(element, jobs)) for element in known]


def _living(known: KnownRun | NotBegun, jobs: dict[str, SlurmJob]) -> list[SlurmJob]:
    if isinstance(known, KnownRun):
        return living_jobs(known.run, jobs)[0]
    return [job for job in tasks_of(known, jobs) if job.state in ACTIVE | WAITING]


def _can_stop(run: RunDirectory, status: RunStatus) -> bool:
    """Whether an attempt of a run trains, or has ended and waits to be continued, and not a `resume` to begin one."""
    waits = status.state in (RunState.REQUEUED, RunState.HELD)
    return status.state.alive or (waits and read_history(run).current_attempt is not None)


def _try(act: Callable[[], object]) -> bool:
    """Whether it could be done: an error in one element must not keep it from the others."""
    try:
        act()
    except ClusterDDPError as error:
        inform(f"cluster-ddp: {error}")
        return False
    return True


def _cancel(sweep: SweepDirectory, job_ids: Sequence[str], *, only_waiting: bool = False) -> None:
    if not job_ids:
        return
    try:
        cancel_job(*job_ids, only_waiting=only_waiting)
    except SlurmError as error:
        raise _may_go_on(sweep, error) from error


def _may_go_on(sweep: SweepDirectory, error: SlurmError) -> SlurmError:
    return SlurmError(
        f"no further element of sweep {sweep.id} will start, but its jobs may still be running or queued: {error}"
    )


def _start_no_more(sweep: SweepDirectory) -> bool:
    """Let no element begin any more, and take the claim from a process that starts some; whether there was one."""
    busy = False

    def withdrawn(record: SweepRecord) -> SweepRecord:
        nonlocal busy
        busy = record.busy
        return withdraw(replace(record, submitting=None), (array.job_id for array in record.arrays))

    try:
        update_sweep(sweep, withdrawn)
    except OSError as error:  # such as a full disk
        arrays = " ".join(array.job_id for array in read_sweep(sweep).arrays)
        end_jobs = f", or end its jobs directly: scancel {arrays}" if arrays else ""
        raise RunError(
            f"sweep {sweep.id} was not stopped: cannot write {sweep.record_file}: {error.strerror or error}\n"
            f"Try again once it can be written{end_jobs}"
        ) from error
    return busy
