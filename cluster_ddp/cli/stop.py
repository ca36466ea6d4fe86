"""``cluster-ddp stop``: save and end, however the run was started."""

from __future__ import annotations

import contextlib

from cluster_ddp.cli.options import RunOrSweep
from cluster_ddp.cli.output import inform
from cluster_ddp.cli.run_states import SLURM_SECONDS, describe_runs, how_to_go_on, or_end_job, say_if_copy
from cluster_ddp.cli.sweep_end import stop_sweep
from cluster_ddp.printing import say_if_slow
from cluster_ddp.run.attempt import attempt_is_alive
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.events import STOP_REQUESTED, EventWriter, caller, login_writer
from cluster_ddp.run.history import read_history
from cluster_ddp.run.jobs import living_jobs, slurm_job_ids
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import find_run_to_change, name_for_commands, runs_dir_of
from cluster_ddp.run.status.keeper_at_work import is_deciding_or_waiting
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.stopfile import PERSON, SCRIPT_GRACE_SECONDS, request_stop
from cluster_ddp.run.sweep import find_sweep
from cluster_ddp.run.via import LAUNCH
from cluster_ddp.slurm.commands import SlurmError, cancel_job, query_jobs
from cluster_ddp.submit.adopting import adopt_run_jobs

_OF_A_SCRIPT = (
    "Its script does not report to cluster-ddp. It is sent SIGTERM or requeue.signal, if it handles one "
    f"of them; after {SCRIPT_GRACE_SECONDS:.0f} s it is killed, and anything it has not saved itself is lost"
)


def command(run: RunOrSweep) -> None:
    """Ask a run, or all elements of a sweep, to save a checkpoint and exit; `resume` continues from there."""
    sweep = find_sweep(run, runs_dir_of(None))
    if sweep is not None:
        stop_sweep(sweep, ask_to_stop)
        return
    with say_if_slow(
        "cluster-ddp: waiting for the storage or Slurm to answer; the run is asked to stop as soon as it does"
    ):
        found = find_run_to_change(run, runs_dir_of(None))
        with contextlib.suppress(SlurmError):  # looking up its state reports this
            adopt_run_jobs(found, seconds=SLURM_SECONDS)
        (status,) = describe_runs([found])
        say_if_copy(found, status.record)
        last_job = ask_to_stop(found, status)
        _take_out_of_queue(found, last_job, waits=not status.state.alive)


def ask_to_stop(found: RunDirectory, status: RunStatus) -> str | None:
    """Ask one run to save and exit, given its latest state; return the Slurm job of its last attempt.

    Its jobs that wait in the queue stay there.

    Raises
    ------
    RunError
        It is neither running nor waiting to continue.
    """
    history = read_history(found)
    last, current = history.last, history.current_attempt
    waits = current is not None and status.state in (RunState.REQUEUED, RunState.HELD)
    if not status.state.alive and not waits:
        raise RunError(
            f"run {found.id} is {status.state.value}: it is not running, so there is nothing to stop."
            f"{_advice(found, status)}"
        )
    over = last is None or attempt_is_alive(history, last) is False
    # An attempt from before a `resume` no longer counts, unless it is alive or its keeper may restart it.
    begun = current is not None or not over or is_deciding_or_waiting(history)
    if last is None or not begun:
        raise RunError(
            f"the job of run {found.id} is starting and not training yet; try again in a moment, or end it for "
            f"good: cluster-ddp cancel {found.id}"
        )
    number = _ask(found, last.number)
    EventWriter(found, login_writer()).write(STOP_REQUESTED, attempt=number, reason=PERSON, by=caller())
    name = name_for_commands(found)
    see = f"(see: cluster-ddp status {name}; continue later: {how_to_go_on(name, status.record)})"
    if over:
        inform(f"attempt {number} of {found.id} has ended already; no other attempt will follow it {see}")
    elif history.reports_nothing:
        inform(f"asked attempt {number} of {found.id} to exit {see}", _OF_A_SCRIPT)
    else:
        inform(f"asked attempt {number} of {found.id} to save and exit {see}")
    return last.slurm_job_id


def _ask(run: RunDirectory, number: int) -> int:
    """Ask an attempt to stop, and the next one if that has begun meanwhile; returns the one that will see it."""
    while True:
        attempt = run.attempt(number)
        try:
            request_stop(attempt, reason=PERSON, by=caller())
        except OSError as error:
            raise RunError(f"cannot write {attempt.stop_file}: {error}{or_end_job(run)}") from error
        newest = read_history(run).last_number
        if newest is None or newest <= number:
            return number
        number = newest


def _take_out_of_queue(run: RunDirectory, last: str | None, *, waits: bool) -> None:
    """Take out the jobs that would go on with the run, or wait and keep it from being resumed.

    The job of the last attempt is one of them if it waits to start again. One that has started meanwhile is left alone:
    it ends by itself, since no attempt follows one that a person has stopped.
    """
    job_ids = [job_id for job_id in slurm_job_ids(run) if waits or job_id != last]
    if last is None or not job_ids:
        return
    try:
        own, _ = living_jobs(run, query_jobs(job_ids))
        for job in own:
            again = job.job_id == last
            if again and not waits:
                continue
            cancel_job(job.job_id, only_waiting=again)
            inform(f"removed Slurm job {job.job_id}{'' if again else ' of its chain'} from the queue")
    except SlurmError as error:
        inform(f"cluster-ddp: other jobs of this run may still be queued; they exit when they start: {error}")


def _advice(run: RunDirectory, status: RunStatus) -> str:
    name = name_for_commands(run)
    if status.record is not None and status.record.via == LAUNCH and status.state is RunState.PENDING:
        return f" Its nodes are still waiting for each other; to end all of them: cluster-ddp cancel {name}"
    if status.state in (RunState.PENDING, RunState.HELD, RunState.REQUEUED):
        return f" It is waiting to start; to remove it from the queue for good: cluster-ddp cancel {name}"
    if status.state is RunState.COMPLETED:
        return f" {status.reason}" if status.reason else ""
    return f" To continue it: {how_to_go_on(name, status.record)}"
