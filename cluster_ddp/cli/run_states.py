"""The states of runs, with one squeue call for all of them; and the summary of a run that has ended here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from cluster_ddp.cli.output import inform
from cluster_ddp.exit_statuses import RUN_FAILED, RUN_STOPPED
from cluster_ddp.printing import one_line
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import resume_command
from cluster_ddp.run.jobs import read_known, slurm_job_ids
from cluster_ddp.run.record import RunRecord, original_of
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import name_for_commands
from cluster_ddp.run.status.cache import Known
from cluster_ddp.run.status.orphaned_jobs import ask_about, with_orphaned_jobs
from cluster_ddp.run.status.report import RunStatus, RunSummary, describe_known
from cluster_ddp.run.status.sweep import SweepCounts
from cluster_ddp.run.via import LAUNCH
from cluster_ddp.slurm.commands import SlurmError, query_ended_jobs
from cluster_ddp.slurm.states import SlurmJob

# RUN_FAILED for all others.
_EXIT_STATUS = {RunState.COMPLETED: 0, RunState.STOPPED: RUN_STOPPED, RunState.CANCELLED: RUN_STOPPED}
_DOUBTFUL = (RunState.LOST, RunState.STOPPED)  # a run that was requeued may have been cancelled there
METRICS_SHOWN = 4
K = TypeVar("K", bound=Known)
S = TypeVar("S", bound=RunSummary)
SlurmJobs = Mapping[str, SlurmJob] | None
SLURM_SECONDS = 20.0
"""Seconds that a person who asks waits for squeue; the run directories say most of it."""


def say_if_copy(run: RunDirectory, record: RunRecord | None) -> None:
    """Tell somebody who changes a copy of a run that it is one."""
    original = original_of(run, record) if record is not None else None
    if original is not None:
        inform(
            f"cluster-ddp: {one_line(str(run.path))} is a copy of {one_line(str(original))}; that run and its Slurm "
            "jobs are left alone"
        )


def describe_runs(runs: Sequence[RunDirectory]) -> list[RunStatus]:
    """The state of each run, with what Slurm says about its jobs; notes it on stderr if Slurm cannot be queried."""
    known = [read_known(run) for run in runs]
    return describe_with(known, ask_slurm(known), describe_known)


def describe_with(known: Sequence[K], jobs: SlurmJobs, describe: Callable[[K, SlurmJobs], S]) -> list[S]:
    """The state of each run with what squeue says and, where that leaves a doubt, what the accounting knows."""
    if jobs is None:
        return [describe(run, jobs) for run in known]
    known = with_orphaned_jobs(known, jobs)
    found = [describe(run, jobs) for run in known]
    doubtful = {s.slurm_job_id for s in found if s.slurm_job_id is not None and s.state in _DOUBTFUL}
    forgotten = frozenset(doubtful.difference(jobs))
    ended = _ended_jobs(forgotten)
    all_jobs = {**jobs, **ended}
    return [describe(run, all_jobs) if s.slurm_job_id in ended else s for run, s in zip(known, found, strict=True)]


@functools.cache
def _ended_jobs(job_ids: frozenset[str]) -> dict[str, SlurmJob]:
    """What the accounting knows of jobs that are over; whoever watches asks once."""
    return query_ended_jobs(job_ids, seconds=SLURM_SECONDS)


def ask_slurm(known: Sequence[Known]) -> SlurmJobs:
    """What squeue says about the jobs of all the runs; None when it cannot be queried."""
    try:
        return ask_about(known, seconds=SLURM_SECONDS)
    except SlurmError as error:
        first_line = str(error).splitlines()[0]
        inform(f"cluster-ddp: Slurm cannot be queried, showing the run directories only: {first_line}")
        return None


def show_metrics(metrics: Mapping[str, float], most: int = METRICS_SHOWN) -> str:
    """The first of the metrics, sorted for people: validation, then training, then the rest."""
    names = sorted(metrics, key=lambda name: (not name.startswith("val/"), not name.startswith("train/"), name))
    return "  ".join(f"{one_line(name)} {metrics[name]:.4g}" for name in names[:most])


def sweep_lines(sweeps: Sequence[SweepCounts]) -> list[str]:
    """One line for each sweep."""
    return [f"sweep {one_line(sweep.sweep.id)}: {one_line(sweep.in_words())}" for sweep in sweeps]


def report_ended(run: RunDirectory, status: RunStatus) -> int:
    """Say how a run that trained here ended and how to go on; returns the exit status."""
    name = name_for_commands(run)
    total = f" of {status.total_steps}" if status.total_steps else ""
    steps = "" if status.step is None else f"step {status.step}{total}"
    failed = status.state not in _EXIT_STATUS and status.attempts
    rows = [
        ("reached", f"{steps}  {show_metrics(status.metrics)}".strip()),
        ("reason", status.reason or ""),
        *(("warning", one_line(text)) for text in status.warnings),
        ("directory", status.directory),
        ("details", f"cluster-ddp status {name}"),
        ("continue", "" if status.state is RunState.COMPLETED else how_to_go_on(name, status.record)),
        ("logs", str(run.attempt(status.attempts - 1).path) if failed else ""),
    ]
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\n{_coloured(status.state)}  {one_line(run.id)}\n")
    inform(*(f"  {label:<10} {text}" for label, text in rows if text))
    return _EXIT_STATUS.get(status.state, RUN_FAILED)


def how_to_go_on(name: str, record: RunRecord | None) -> str:
    """The command that continues a run that is over; `name` is how commands find the run."""
    by_hand = record is not None and record.via == LAUNCH
    return "run the same commands again, on every node" if by_hand else resume_command(name)


def or_end_job(run: RunDirectory) -> str:
    """Say how to end a run in whose directory nothing can be written, since its storage is full, say."""
    job_ids = slurm_job_ids(run)
    return f"\nTry again once it can be written to, or end its job directly: scancel {job_ids[-1]}" if job_ids else ""


def _coloured(state: RunState) -> str:
    if not sys.stderr.isatty():
        return state.value
    colour = {0: 32, RUN_STOPPED: 33}.get(_EXIT_STATUS.get(state, RUN_FAILED), 31)
    return f"\x1b[1;{colour}m{state.value}\x1b[0m"
