"""``python -m cluster_ddp.submit.own_run SCRIPT JOB [--set A.B=C]...``: makes a run for a script started without one.

It prints the run's directory. The first start of a Slurm job makes the run and notes the job's id in the run's record,
by which every later start of the same job finds the run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.launch.keeper.patience import PASSING_SECONDS, storage_error
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.record import add_slurm_job, read_record
from cluster_ddp.run.runs import create_run, list_runs, runs_dir_of
from cluster_ddp.run.via import SBATCH
from cluster_ddp.slurm.start import SlurmStart, this_start
from cluster_ddp.submit.base import as_program, check_writable, note_submitted

_POLL_SECONDS = 1.0


def own_run(start: SlurmStart, script: Path, job: str, settings: Sequence[str]) -> RunDirectory:
    """Return the run that a Slurm job has made, or a new one with a copy of `script` as it runs, edits included."""
    from cluster_ddp.job import load_job

    spec = load_job(job, settings).spec
    runs_dir = runs_dir_of(spec)
    # Slurm reuses job ids, but a first start has made no run yet.
    found = _made_by(start.task, runs_dir) if start.restart_count else None
    if found is not None:
        return found
    check_writable(runs_dir)
    run = create_run(spec, runs_dir=runs_dir, via=SBATCH, script=script.read_text())
    add_slurm_job(run, start.task)
    note_submitted(run, SBATCH, start.task)
    return run


def _made_by(job_id: str, runs_dir: Path) -> RunDirectory | None:
    """Return the newest run in which a Slurm job is noted."""
    for run in reversed(_runs_in(runs_dir)):
        try:
            if job_id in read_record(run).slurm_job_ids:
                return run
        except RunError:
            continue  # one damaged run must not hide the others
    return None


def _runs_in(runs_dir: Path) -> list[RunDirectory]:
    """List the runs, once storage lets them be listed; raises `RunError` if it does not for too long.

    A run that is not seen would be made, and begun, a second time.
    """
    began = time.monotonic()
    while True:
        try:
            return list_runs(runs_dir)
        except RunError as error:
            if storage_error(error) is None or time.monotonic() - began > PASSING_SECONDS:
                raise
            time.sleep(_POLL_SECONDS)


@as_program
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster_ddp.submit.own_run")
    parser.add_argument("script", type=Path)
    parser.add_argument("job")
    parser.add_argument("--set", dest="settings", metavar="A.B=C", action="append", default=[])
    parsed = parser.parse_args(arguments)
    start = this_start(os.environ)
    if start is None:
        raise RunError("there is no SLURM_JOB_ID here: submit the script with sbatch")
    print(own_run(start, parsed.script, parsed.job, parsed.settings).path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
