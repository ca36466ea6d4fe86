"""``cluster-ddp cancel``: end a run for good."""

from __future__ import annotations

from cluster_ddp.cli.options import RunOrSweep
from cluster_ddp.cli.output import inform
from cluster_ddp.cli.run_states import SLURM_SECONDS, how_to_go_on, or_end_job, say_if_copy
from cluster_ddp.cli.sweep_end import cancel_sweep
from cluster_ddp.run.attempt import attempt_is_alive
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.events import CANCELLED, COMPLETED, EventWriter, caller, login_writer
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.jobs import living_jobs, slurm_job_ids
from cluster_ddp.run.record import RunRecord, is_of_original, read_record, run_in_comment
from cluster_ddp.run.runs import find_run_to_change, name_for_commands, runs_dir_of
from cluster_ddp.run.status.keeper_at_work import is_deciding_or_waiting
from cluster_ddp.run.stopfile import AT_ONCE, CANCEL, request_stop
from cluster_ddp.run.sweep import find_sweep
from cluster_ddp.slurm.commands import SlurmError, cancel_job, query_jobs
from cluster_ddp.submit.adopting import adopt_run_jobs


def command(run: RunOrSweep) -> None:
    """End a run or a sweep immediately and for good: nothing requeues it, only `resume` starts it again."""
    sweep = find_sweep(run, runs_dir_of(None))
    if sweep is not None:
        cancel_sweep(sweep, _mark)
        return
    found = find_run_to_change(run, runs_dir_of(None))
    record = _record_of(found)
    say_if_copy(found, record)
    if read_history(found).current(COMPLETED):
        inform(f"run {found.id} is complete; nothing to cancel")
        return
    _mark(found)
    ended = _cancel_jobs(found, record)
    jobs = f" and its Slurm job{'s' if len(ended) > 1 else ''} {', '.join(ended)}" if ended else ""
    inform(f"cancelled {found.id}{jobs} (to start it again: {how_to_go_on(name_for_commands(found), record)})")


def _mark(found: RunDirectory) -> None:
    """Mark a run that is not complete as cancelled, and have what is alive of it end."""
    found.refuse_links()
    history = read_history(found)
    if history.current(COMPLETED):
        return
    # The event comes first: from now on nothing begins another attempt, even if what follows fails.
    number = history.last.number if history.last else None
    if not EventWriter(found, login_writer()).write(CANCELLED, attempt=number, by=caller()):
        raise RunError(f"run {found.id} was not cancelled: cannot write to {found.events}{or_end_job(found)}")
    _stop_last_attempt(found, history)


def _record_of(run: RunDirectory) -> RunRecord | None:
    """The run's record; says so where it cannot be read."""
    try:
        return read_record(run)
    except RunError as error:
        inform(f"cluster-ddp: {error}. Slurm jobs recorded only there are not cancelled")
        return None


def _stop_last_attempt(run: RunDirectory, history: History) -> None:
    """Write the stop file: it ends a local run, and tells the keeper of a Slurm job what the next SIGTERM means."""
    last = history.last
    if last is None or (attempt_is_alive(history, last) is False and not is_deciding_or_waiting(history)):
        return
    try:
        request_stop(run.attempt(last.number), reason=CANCEL, level=AT_ONCE, by=caller())
    except OSError as error:
        inform(f"cluster-ddp: cannot write the stop file of attempt {last.number}: {error}")


def _cancel_jobs(run: RunDirectory, record: RunRecord | None) -> list[str]:
    job_ids = slurm_job_ids(run)
    try:
        adopt_run_jobs(run, seconds=SLURM_SECONDS)
        job_ids = slurm_job_ids(run)
        own, others = living_jobs(run, query_jobs(job_ids))
        for job in own:
            cancel_job(job.job_id)
    except SlurmError as error:
        which = f"its Slurm job {job_ids[-1]}" if job_ids else "one of its Slurm jobs"
        raise SlurmError(
            f"run {run.id} is marked as cancelled and no new attempt will start, but {which} may still run: {error}"
        ) from error
    for job in others:
        if record is not None and is_of_original(run, record, job.job_id):
            continue
        named = run_in_comment(job.comment)
        whose = f"names run {named}" if named else "names no run"
        inform(
            f"cluster-ddp: Slurm job {job.job_id} ({job.state}) is recorded in this run, but its comment {whose}; it "
            f"is left alone. To end it: scancel {job.job_id}"
        )
    return [job.job_id for job in own]
