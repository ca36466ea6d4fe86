"""What commands print: a few lines for people, or JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.printing import one_line, printable, say

if TYPE_CHECKING:
    from cluster_ddp.run.directory import RunDirectory
    from cluster_ddp.run.run_state import RunState
    from cluster_ddp.run.sweep import SweepDirectory


def inform(*lines: str) -> None:
    """Print something for the user on standard error: standard output is for programs."""
    for line in lines:
        say(line)


def show(*lines: str) -> None:
    """Print what was asked for, on standard output."""
    for line in lines:
        print(printable(line))


def show_json(value: object) -> None:
    """Print the answer of ``--json``."""
    print(json.dumps(value, indent=2))


def remark(remarks: Iterable[str]) -> None:
    """Pass on remarks about the job file."""
    inform(*(f"note: {text}" for text in remarks))


def report_submitted(run: RunDirectory, job_id: str | None) -> None:
    """Say what was submitted and what to do next."""
    from cluster_ddp.run.runs import name_for_commands  # most commands report nothing of this kind

    inform(f"run {run.id}" + (f", Slurm job {job_id}" if job_id else ""))
    say_what_next(name_for_commands(run), run.path)


def say_what_next(name: str, directory: Path) -> None:
    """Say what can be done with a run or a sweep that was submitted; `name` is how commands find it."""
    inform(
        f"  directory:  {one_line(str(directory))}",
        f"  watch:      cluster-ddp status {name} --watch",
        f"  end early:  cluster-ddp stop {name}   (for good: cancel)",
    )


def say_no_runs(runs_dir: Path) -> None:
    """Say that there is nothing to show."""
    inform(f"there are no runs in {runs_dir} (set CLUSTER_DDP_RUNS to use another folder)")


def show_dry_run(script: str, *facts: str) -> None:
    """Print the script of a dry run alone on standard output, and everything else on standard error."""
    # A file gets the script as it is; on a terminal, escape sequences in it are shown and not obeyed.
    sys.stdout.write(printable(script) if sys.stdout.isatty() else script)
    sys.stdout.flush()
    inform("", "dry run: nothing was written or submitted", *facts)


def print_json_line(run: RunDirectory | SweepDirectory, slurm_job_id: str | None, state: RunState) -> None:
    """Print the line of ``--json``: run_id, directory, slurm_job_id, state. Nobody has to read it.

    If it cannot be written the exit status stays as it is: one that says that the job was not submitted would be wrong.
    """
    fields = {"run_id": run.id, "directory": str(run.path), "slurm_job_id": slurm_job_id, "state": state.value}
    try:
        print(json.dumps(fields), flush=True)
    except OSError as error:
        discard_output()
        if not isinstance(error, BrokenPipeError):
            inform(f"cluster-ddp: could not write the --json line: {error.strerror}")


def discard_output() -> None:
    """Discard the rest of standard output: Python would complain once more while flushing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
