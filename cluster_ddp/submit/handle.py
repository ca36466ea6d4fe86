"""Runs from Python: `submit` starts one, and a `RunHandle` represents it, whatever started it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from pathlib import Path

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.printing import say
from cluster_ddp.run.jobs import read_known
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import find_run, runs_dir_of
from cluster_ddp.run.status.orphaned_jobs import ask_about, with_orphaned_jobs
from cluster_ddp.run.status.report import RunStatus, describe_known
from cluster_ddp.run.via import LOCAL, QUEUED, SBATCH
from cluster_ddp.slurm.commands import SlurmError
from cluster_ddp.submit.base import Submission, SubmitError, start_run
from cluster_ddp.submit.preflight import check_before_queue
from cluster_ddp.submit.ways import submission

_QUEUE_SECONDS = 20.0


class RunFailed(ClusterDDPError):
    """The run whose result was requested ended without one."""

    exit_status = exit_statuses.RUN_FAILED


class RunHandle:
    """A run, to be watched and ended from Python.

    Parameters
    ----------
    run
        A run directory, a run id or a unique prefix of one, as on the command line.

    Raises
    ------
    RunNotFound
        There is no such run, or more than one.

    Attributes
    ----------
    id
        The run's id.
    directory
        The run directory.
    """

    def __init__(self, run: str | PathLike[str]) -> None:
        self._run = find_run(fspath(run), runs_dir_of(None))
        self.id: str = self._run.id
        self.directory: Path = self._run.path

    def __repr__(self) -> str:
        return f"RunHandle({str(self.directory)!r})"

    def status(self) -> RunStatus:
        """Return the run's state, step, total_steps, metrics, reason, and all other fields of `status --json`.

        If Slurm cannot be queried, the status is derived from the run directory alone.
        """
        known = read_known(self._run)
        try:
            jobs = ask_about([known], seconds=_QUEUE_SECONDS)
        except SlurmError:
            return describe_known(known, None)
        (known,) = with_orphaned_jobs([known], jobs)
        return describe_known(known, jobs)

    @property
    def state(self) -> RunState:
        """The run's state, which compares equal to its name: ``handle.state == "RUNNING"``."""
        return self.status().state

    def wait(self, timeout: float | None = None, *, poll: float = 5.0) -> RunState:
        """Wait until nothing more will happen to the run by itself, across requeues; return its state.

        Parameters
        ----------
        timeout
            Seconds; None for no limit.
        poll
            Seconds between queries, each of which calls Slurm.

        Raises
        ------
        TimeoutError
            The run is not over by then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (state := self.state).open or state is RunState.HELD:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} is still {state.value} after {timeout:g} s")
            time.sleep(poll)
        return state

    def result(self, timeout: float | None = None, *, poll: float = 5.0) -> RunStatus:
        """Wait for the run to complete; return its status, with the latest metrics.

        Raises
        ------
        RunFailed
            It ended differently: failed, stalled, stopped, cancelled or lost.
        TimeoutError
            It is not over by then.
        """
        self.wait(timeout, poll=poll)
        status = self.status()
        if status.state is not RunState.COMPLETED:
            raise RunFailed(f"run {self.id} is {status.state.value}: {status.reason or 'no reason is known'}")
        return status

    def logs(
        self, *, attempt: int | None = None, node: int | None = None, rank: int | None = None, errors: bool = False
    ) -> str:
        """Return what the run has printed, as shown by `cluster-ddp logs`.

        Parameters
        ----------
        attempt, node, rank
            Select one of each; by default the last attempt, all nodes and all ranks.
        errors
            Return the error of the rank that failed first instead.
        """
        chosen = {"attempt": attempt, "node": node, "rank": rank}
        options = [f"--{name}={number}" for name, number in chosen.items() if number is not None]
        return self._call("logs", *options, *(["--errors"] if errors else []))

    def stop(self) -> None:
        """Make the run save a checkpoint and end, as `cluster-ddp stop` does; it can be resumed.

        Raises
        ------
        SubmitError
            It is not running, or its state cannot be queried.
        """
        self._call("stop")

    def cancel(self) -> None:
        """End the run for good, as `cluster-ddp cancel` does; only `resume` restarts it.

        Raises
        ------
        SubmitError
            It cannot be cancelled.
        """
        self._call("cancel")

    def _call(self, command: str, *options: str) -> str:
        """Run a command of the command line, the only implementation, and return its output."""
        words = [sys.executable, "-m", "cluster_ddp", command, str(self.directory), *options]
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SubmitError(done.stderr.strip().removeprefix("cluster-ddp: "))
        return done.stdout


def submit(
    job: str | PathLike[str], *, via: str = SBATCH, settings: Sequence[str] = (), check: bool = True
) -> RunHandle:
    """Check a job, make its run directory, and start it.

    Parameters
    ----------
    job
        A job file, or a template's name.
    via
        ``sbatch``, ``submitit``, or ``local``: on this machine, in the background, with the output in `local.out` in
        the run directory; it continues when this process ends.
    settings
        ``a.b=c`` each, as for ``--set``.
    check
        Check first whether the task exists, the storage is shared and the cluster can provide what is requested.

    Raises
    ------
    JobFileError
        The job file or a setting is wrong.
    SubmitError, SlurmError
        The job cannot run as requested, or Slurm refuses it.
    """
    from cluster_ddp.job import load_job

    if via not in (*QUEUED, LOCAL):
        raise SubmitError(f"via={via!r}: must be one of {', '.join((*QUEUED, LOCAL))}")
    loaded = load_job(fspath(job), settings, check_target=check)
    sending: Submission
    if via == LOCAL:
        from cluster_ddp.submit.background import LocalSubmission

        sending = LocalSubmission(loaded.spec)
    else:
        sending = submission(loaded.spec, via)
    _remark((*loaded.warnings, *sending.remarks))
    if check and via != LOCAL:
        check_before_queue(loaded, sending, _remark)
    run, _ = start_run(loaded.spec, sending)
    return RunHandle(run.path)


def _remark(remarks: Iterable[str]) -> None:
    for remark in remarks:
        say(f"note: {remark}")
