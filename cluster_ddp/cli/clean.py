"""``cluster-ddp clean``: frees storage that old runs no longer need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cluster_ddp import words
from cluster_ddp.cli.best import best_checkpoint
from cluster_ddp.cli.options import Runs
from cluster_ddp.cli.output import inform, remark, show
from cluster_ddp.cli.run_states import describe_runs
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.printing import one_line
from cluster_ddp.run.attempt_record import attempt_numbers
from cluster_ddp.run.directory import RunDirectory, steps_in
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import find_run_to_change, list_runs, runs_dir_of
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.sweep import SweepDirectory, find_sweep, list_sweeps, runs_in


def command(
    runs: Runs = None,
    older: Annotated[str, typer.Option(metavar="AGE", help="Only runs that have not changed for this long.")] = "30d",
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep only the best checkpoint, not the last, if there is a best one.")
    ] = False,
    resumable: Annotated[
        bool, typer.Option("--resumable", help="Also runs that have not completed and could be resumed.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Keep no checkpoint at all.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them. Without it, only show what would be removed.")
    ] = False,
) -> None:
    """Remove the checkpoints of old, completed runs except the last and the best. Without --yes, only list them."""
    age = _seconds(older)
    runs_dir = runs_dir_of(None)
    found = [run for name in runs for run in _named(name, runs_dir)] if runs else _all(runs_dir)
    old = [run for run in found if time.time() - _last_change(run) >= age]
    began: dict[RunDirectory, list[int]] = {}  # read before the run is judged, so that a later attempt is noticed
    for run in old:
        with _reporting_errors(run):
            began[run] = attempt_numbers(run)
    total = 0
    for (run, attempts), status in zip(began.items(), describe_runs(list(began)), strict=True):
        if _may_be_cleaned(status, resumable=resumable):
            with _reporting_errors(run):
                total += _clean(run, attempts, keep_best=keep_best, everything=everything, yes=yes)
        elif status.state is not RunState.COMPLETED and runs:
            remark([f"{_name(run)} is {status.state.value} and is left alone"])
    did = "removed" if yes else "would be removed; --yes removes them"
    nothing = "nothing to remove" if found else f"nothing to remove: there are no runs in {runs_dir}"
    inform(f"{words.size(total)} {did}" if total else nothing)


def _named(name: str, runs_dir: Path) -> list[RunDirectory]:
    """The run that is meant, or those of the sweep."""
    sweep = find_sweep(name, runs_dir)
    return [find_run_to_change(name, runs_dir)] if sweep is None else runs_in(sweep)


def _all(runs_dir: Path) -> list[RunDirectory]:
    """The runs in the runs folder, and those of the sweeps there."""
    found = list_runs(runs_dir)
    for sweep in list_sweeps(runs_dir):
        with _reporting_errors(sweep):
            found += runs_in(sweep)
    return found


def _name(run: RunDirectory) -> str:
    """The name by which a person calls a run: its id, after the sweep's for an element."""
    return one_line(f"{run.sweep_id}/{run.id}" if run.sweep_id else run.id)


def _seconds(text: str) -> int:
    from cluster_ddp.job.units import DURATION_FORMS, parse_duration

    try:
        return parse_duration(text)
    except ValueError:
        raise RunError(f"--older {text!r} is not {DURATION_FORMS}") from None


def _may_be_cleaned(status: RunStatus, *, resumable: bool) -> bool:
    if status.state is RunState.COMPLETED:
        return True
    over = (RunState.STOPPED, RunState.FAILED, RunState.STALLED, RunState.CANCELLED)
    return resumable and status.state in over


def _clean(run: RunDirectory, attempts: list[int], *, keep_best: bool, everything: bool, yes: bool) -> int:
    from cluster_ddp.checkpoint.cleaning import heavy_folders, remove_folders

    keep = set() if everything else _kept(run, keep_best=keep_best, verify=yes)
    folders = heavy_folders(run, keep)
    for folder in folders:
        show(f"{words.size(folder.size):>10}  {_name(run)}/checkpoints/{one_line(folder.path.name)}")
    return remove_folders(run, folders, attempts) if yes and folders else sum(folder.size for folder in folders)


def _kept(run: RunDirectory, *, keep_best: bool, verify: bool) -> set[int]:
    """The steps whose checkpoints stay; all, where none is intact.

    Parameters
    ----------
    verify
        Read all of the last one, which is only worth keeping if it is intact.
    """
    from cluster_ddp.checkpoint.errors import CheckpointError
    from cluster_ddp.checkpoint.verify import list_checkpoints, newest_intact, run_id_of

    steps = steps_in(run.checkpoints)
    best = best_checkpoint(run, list_checkpoints(run.checkpoints, run_id_of(run), read_all=False))
    if keep_best and best is not None:
        last = newest_intact(run.checkpoints, run_id_of(run), step=best)[1].step if verify else best
        return {last}
    if not steps:
        return set()
    try:
        last = newest_intact(run.checkpoints, run_id_of(run))[1].step if verify else steps[-1]
    except CheckpointError as error:
        raise RunError(f"{run.id}: left alone, since none of its checkpoints is intact: {error}") from error
    return {steps[-1], last} | ({best} if best is not None else set())


def _last_change(run: RunDirectory) -> float:
    """When anything was last written to a run, in Unix seconds."""
    times = [0.0]
    for path in (run.path, run.record_file, run.events, run.metrics_file, run.attempts, run.checkpoints):
        with contextlib.suppress(OSError):
            times.append(path.lstat().st_mtime)
    with contextlib.suppress(OSError):
        times += [file.lstat().st_mtime for file in run.events.iterdir()]
    return max(times)


@contextlib.contextmanager
def _reporting_errors(run: RunDirectory | SweepDirectory) -> Iterator[None]:
    """A run that cannot be cleaned does not keep others from being cleaned."""
    name = _name(run) if isinstance(run, RunDirectory) else one_line(run.id)
    try:
        yield
    except NotADirectoryError as error:
        what = "is not a folder. Put the folder back, or remove the file that is there instead"
        remark([f"{name} is left alone: {error.filename} {what}"])
    except (ClusterDDPError, OSError) as error:
        remark([f"{name}: {error}"])
