"""``python -m cluster_ddp.launch.keeper --run DIRECTORY --warning USR1 -- srun ... -- torchrun ...``

Exit status: 0 when the run is complete, was stopped, or is requeued; 1 when Slurm refuses the requeue; 4 when the run
has failed or stalled; 75 when another attempt is alive; 76 when only a person may restart the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.keeper.allocation import SlurmAllocation
from cluster_ddp.launch.keeper.batch_host import BatchHost, say
from cluster_ddp.launch.keeper.keeper import Keeper
from cluster_ddp.launch.keeper.requeueing import RequeueFailed
from cluster_ddp.process import fast_exit, limit_umask
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded
from cluster_ddp.run.run_state import RunState
from cluster_ddp.slurm.start import this_start


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cluster_ddp.launch.keeper", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--run", required=True, type=Path, help="the run directory")
    parser.add_argument("--warning", required=True, help="the signal that announces the job's end, such as USR1")
    parser.add_argument("job_step", nargs=argparse.REMAINDER, help="-- srun ...")
    parsed = parser.parse_args(arguments)
    parsed.job_step = parsed.job_step[1:] if parsed.job_step[:1] == ["--"] else parsed.job_step
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Keep one start of the job; return the exit status."""
    parsed = _arguments(arguments)
    host = BatchHost()
    host.glance(lambda: limit_umask(parsed.run))  # it reads the folder's mode, and storage may hang
    start = this_start(os.environ)
    if start is None:
        say("the keeper runs inside a Slurm job, and there is no SLURM_JOB_ID here")
        return 2
    run, warning = RunDirectory(parsed.run.absolute()), signal.Signals[f"SIG{parsed.warning}"]
    try:
        kept = Keeper(run, parsed.job_step, SlurmAllocation(start), warning=warning, host=host).keep()
    except RunAlive as error:
        return _refuse(error, exit_statuses.RUN_ALIVE)
    except RunEnded as error:
        return _refuse(error, 0 if error.state is RunState.COMPLETED else exit_statuses.RUN_ENDED)
    except RequeueFailed as error:
        return _refuse(error, 1)
    except ClusterDDPError as error:
        return _refuse(error, error.exit_status)
    return exit_statuses.RUN_FAILED if kept.job_action == "fail" else 0


def _refuse(error: ClusterDDPError, status: int) -> int:
    say(str(error))
    return status


if __name__ == "__main__":
    fast_exit(main(sys.argv[1:]), at_once=True)
