"""``python -m cluster_ddp.submit.element SWEEP NUMBER``: the run of one element of a sweep, made at its first start.

It prints the run's directory. With ``--arguments RUN`` it prints the arguments for the script of a run instead, each
followed by a NUL.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import ElementWithdrawn, RunError, to_continue
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.storage import Storage
from cluster_ddp.run.sweep import Element, SweepDirectory, read_sweep
from cluster_ddp.run.via import SBATCH
from cluster_ddp.slurm.start import this_start
from cluster_ddp.submit.base import as_program, note_submitted


def run_of_element(sweep: SweepDirectory, element: Element, *, via: str, job: str | None) -> RunDirectory:
    """Return the run of an element, creating it if necessary.

    Parameters
    ----------
    via
        How it is started.
    job
        The task of a Slurm array that starts it; None outside of Slurm.

    Raises
    ------
    ElementWithdrawn
        The sweep was stopped or cancelled while this element waited to start, for the first time or again.
    """
    run = sweep.run(element)
    if job is not None and job.partition("_")[0] in read_sweep(sweep).withdrawn:
        raise ElementWithdrawn(
            f"sweep {sweep.id} was stopped or cancelled before this start of its element {element.name}.\n"
            f"{to_continue(sweep.id)}"
        )
    if not run.exists():
        _make(sweep, element, via)
        note_submitted(run, via, job)
    if job is not None:
        add_slurm_job(run, job)
    return run


def _make(sweep: SweepDirectory, element: Element, via: str) -> None:
    """Make a run under its name in one step, so that a second start of the element finds the run of the first."""
    from cluster_ddp.job import load_variant

    spec = load_variant(sweep.job_file, element.settings)
    script = sweep.script.read_text() if via == SBATCH else None
    storage, draft = Storage(), sweep.path / f".begin-{os.urandom(6).hex()}"
    try:
        storage.mkdir(draft)
        try:
            run = create_run(spec, runs_dir=draft, via=via, script=script, folder=element.name)
            storage.rename(run.path, sweep.run(element).path)
        except OSError:
            if not sweep.run(element).exists():
                raise
        finally:
            storage.rmtree(draft)
        storage.fsync_dir(sweep.path)
    except OSError as error:
        raise RunError(f"cannot make the run {sweep.run(element).path}: {error.strerror or error}") from error


def arguments_of(run: RunDirectory) -> tuple[str, ...]:
    """Return the arguments for the script of a run."""
    from cluster_ddp.job import load_resolved

    return load_resolved(run.job_file).args


@as_program
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster_ddp.submit.element")
    parser.add_argument("sweep", type=Path, nargs="?")
    parser.add_argument("number", type=int, nargs="?", default=0)
    parser.add_argument("--arguments", type=Path, metavar="RUN")
    parsed = parser.parse_args(arguments)
    start = this_start(os.environ)
    if parsed.arguments is not None:
        sys.stdout.write("".join(f"{word}\0" for word in arguments_of(RunDirectory(parsed.arguments))))
        return
    if start is None or parsed.sweep is None:
        raise RunError(
            "only a Slurm job starts an element of a sweep this way, and it names the sweep's folder and the element"
        )
    sweep = SweepDirectory(parsed.sweep.absolute())
    elements = read_sweep(sweep).elements
    if not 0 <= parsed.number < len(elements):
        raise RunError(f"sweep {sweep.id} has no element {parsed.number}")
    print(run_of_element(sweep, elements[parsed.number], via=SBATCH, job=start.task).path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
