"""What submitit pickles and calls: the name of a run directory, from which the keeper is started.

On Slurm the keeper is the same as under our own batch script, and submitit only starts it. Under submitit's local
executor the step is one node program on this machine, and submitit does the requeue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.run.directory import RunDirectory

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

    from cluster_ddp.job import JobSpec
    from cluster_ddp.launch.keeper.allocation import Allocation
    from cluster_ddp.launch.keeper.deciding import KeptStart
    from cluster_ddp.slurm.start import SlurmStart

_SIGNAL_VARIABLE = "SUBMITIT_PREEMPT_SIGNAL"


class SubmititRunFailed(ClusterDDPError):
    """The run has failed or stalled; submitit treats any exception as a failed job."""

    exit_status = exit_statuses.RUN_FAILED


def warning_name() -> str:
    """Return the name of the signal with which submitit announces the end of a job."""
    return os.environ.get(_SIGNAL_VARIABLE, "USR2")


class SubmititJob:
    """A run, as called by submitit's executors; only the absolute path of its directory is pickled."""

    def __init__(self, run_directory: str) -> None:
        self.run_directory = run_directory

    def __call__(self) -> str:
        """See one start of the job through.

        Returns
        -------
        str
            ``done`` or ``stop``. (Does not return when the job is requeued: for submitit it is not over then.)

        Raises
        ------
        SubmititRunFailed
            The run has failed or stalled.
        RunAlive, RunEnded
            The attempt cannot begin.
        """
        from cluster_ddp.run.errors import RunEnded
        from cluster_ddp.run.run_state import RunState

        try:
            kept = _keep(RunDirectory(Path(self.run_directory)))
        except RunEnded as error:
            if error.state is RunState.COMPLETED:
                return "done"
            raise
        if kept.job_action == "requeue":
            sys.exit(0)
        if kept.job_action == "fail":
            raise SubmititRunFailed(f"run {Path(self.run_directory).name} ({kept.action}): {kept.why}")
        return kept.action

    def checkpoint(self) -> DelayedSubmission:
        """Return what submitit should requeue: the same run directory."""
        import submitit

        return submitit.helpers.DelayedSubmission(SubmititJob(self.run_directory))


def _keep(run: RunDirectory) -> KeptStart:
    from cluster_ddp.job import load_resolved
    from cluster_ddp.launch.keeper.allocation import SlurmAllocation
    from cluster_ddp.launch.keeper.job_step import SRUN, node_program
    from cluster_ddp.launch.keeper.keeper import Keeper
    from cluster_ddp.network import resolve
    from cluster_ddp.process import limit_umask
    from cluster_ddp.slurm.start import this_start

    limit_umask(run.path)
    warning = signal.Signals[f"SIG{warning_name()}"]
    spec = load_resolved(run.job_file)
    start = this_start(os.environ) if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" else None
    step = node_program(sys.executable, str(run.path), _torchrun(spec, run, start))
    os.environ.update(resolve(spec.network, os.environ).variables)  # what the batch script would export
    allocation: Allocation
    if start is None:
        allocation = _ThisMachine(signal.getsignal(warning), warning)
    else:
        allocation, step = SlurmAllocation(start), [*SRUN, *step]
    return Keeper(run, step, allocation, warning=warning).keep()


def _torchrun(spec: JobSpec, run: RunDirectory, start: SlurmStart | None) -> list[str]:
    from cluster_ddp.launch.address import LOOPBACK
    from cluster_ddp.launch.keeper.job_step import ATTEMPT, PORT
    from cluster_ddp.launch.torchrun.command import torchrun_command
    from cluster_ddp.slurm.nodelist import first_host

    if start is None:
        nodes, address, name = 1, LOOPBACK, run.id
    else:
        nodes, address, name = start.nodes, first_host(start.node_list), start.job_id
    port = spec.launch.fixed_port or PORT
    return torchrun_command(
        spec,
        run_directory=str(run.path),
        nodes=nodes,
        procs=spec.procs_per_node,
        rdzv_id=f"{name}.{ATTEMPT}",
        endpoint=f"{address}:{port}",
    )


class _ThisMachine:
    """What submitit's local executor provides: this machine, and a controller that restarts the job.

    Parameters
    ----------
    requeue
        submitit's handler of its signal. It asks `SubmititJob.checkpoint` what to requeue, and ends this process.
    """

    start = None
    ends_at = None
    kill_wait = 30.0  # nothing kills processes here

    def __init__(self, requeue: Any, warning: signal.Signals) -> None:
        self._requeue: Callable[[int, None], NoReturn] = requeue
        self._warning = warning

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}

    def ask_ahead(self) -> bool:
        return False

    def why_it_ends(self, seconds: float) -> str:
        """See `Allocation`: a SIGTERM is never explained here."""
        del seconds
        from cluster_ddp.slurm.job_info import TERMINATED

        return TERMINATED

    def end(self, since: float, seconds: float) -> tuple[str, float | None]:
        del since, seconds
        return self.why_it_ends(0.0), None

    def missing_command(self) -> None:
        """See `Allocation`: no command is needed here."""

    def requeue(self) -> NoReturn:
        self._requeue(int(self._warning), None)

    def prevent_restart(self, *, unwanted: bool) -> None:
        """See `Allocation`: submitit's controller restarts nothing by itself."""

    def has_enough_others(self, bad: Sequence[str]) -> bool:
        return False

    def exclude(self, bad: Sequence[str], link: str | None = None) -> bool:
        return False
