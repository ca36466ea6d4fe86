"""``cluster-ddp status``: the state of runs."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from cluster_ddp.cli.options import JsonStatus, Runs
from cluster_ddp.cli.output import say_no_runs, show, show_json
from cluster_ddp.cli.run_states import show_metrics, sweep_lines
from cluster_ddp.cli.screen import alternate_screen, draw, is_screen
from cluster_ddp.cli.selection import Selection, Snapshot
from cluster_ddp.cli.table import table
from cluster_ddp.printing import one_line, printable
from cluster_ddp.run.status.goodput import Goodput
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.words import duration, moment

_REFRESH_SECONDS = 2.0
_UNKNOWN = "unknown (the script does not report any)"
_STALE_SECONDS = 60.0  # after which the lack of reported steps is mentioned
_VALUE_COLUMN = 19  # of the values in the details of one run


def command(
    runs: Runs = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until nothing more will happen.")] = False,
    as_json: JsonStatus = False,
) -> None:
    """Show the status of runs: state, step, checkpoint, metrics, lost time."""
    selection = Selection(runs or [])
    if watch:
        _watch(selection, as_json=as_json)
    elif as_json:
        show_json(selection.json(selection.snapshot()))
    else:
        _print(selection.snapshot(), selection)


def _print(snapshot: Snapshot, selection: Selection) -> None:
    if not snapshot.runs and not snapshot.sweeps:
        say_no_runs(selection.runs_dir)
    show(*_lines(snapshot, selection))


def _lines(snapshot: Snapshot, selection: Selection) -> list[str]:
    """The details of a run, or the table of several runs and a line for each sweep."""
    if selection.single:
        return _detail(snapshot.runs[0]).split("\n")
    return [*_runs_table(snapshot.runs), *selection.best(snapshot.runs), *sweep_lines(snapshot.sweeps)]


def _runs_table(found: list[RunStatus]) -> Iterator[str]:
    if not found:
        return iter(())
    on_terminal = sys.stdout.isatty()  # a pipe takes lines of any length
    return table(_columns(found), shutil.get_terminal_size().columns if on_terminal else None)


def _watch(selection: Selection, *, as_json: bool) -> None:
    """Show the states until no run will change by itself any more, or the person presses Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not is_screen():
            _watch_changes(selection, as_json=as_json)
        else:
            _watch_in_place(selection)


def _watch_in_place(selection: Selection) -> None:
    snapshot = None
    try:
        with alternate_screen():
            for snapshot in _snapshots(selection):
                draw([printable(line) for line in _lines(snapshot, selection)])
    finally:
        if snapshot is not None:
            _print(snapshot, selection)  # what was seen last stays in view


def _watch_changes(selection: Selection, *, as_json: bool) -> None:
    shown = ""
    for snapshot in _snapshots(selection):
        lines = [*map(_line, snapshot.runs), *sweep_lines(snapshot.sweeps)]
        text = json.dumps(selection.json(snapshot)) if as_json else "\n".join(lines)
        if text != shown:
            show(text)
            sys.stdout.flush()
            shown = text


def _snapshots(selection: Selection) -> Iterator[Snapshot]:
    """Look every so often, as long as anything may change by itself."""
    while True:
        snapshot = selection.snapshot()
        yield snapshot
        if not snapshot.open:
            return
        time.sleep(_REFRESH_SECONDS)


def _detail(status: RunStatus) -> str:
    rows = [
        ("state", status.state.value + (f" ({status.reason})" if status.reason else "")),
        *(("warning", one_line(text)) for text in status.warnings),
        *([("progress", _UNKNOWN)] if status.reports_nothing else [("step", _progress(status) + _age(status))]),
        *([("training", one_line(status.training))] if status.training else _ranks(status)),
        *([("speed", _speed(status))] if status.samples_per_second or status.seconds_left is not None else []),
        ("samples", "-" if status.samples is None else f"{status.samples:,}"),
        ("last checkpoint", "none" if status.last_checkpoint is None else f"step {status.last_checkpoint}"),
        ("attempts", str(status.attempts)),
        *([("last failure", one_line(status.last_failure or ""))] if _failed_before(status) else []),
        ("Slurm job", status.slurm_job_id or "-"),
        ("metrics", show_metrics(status.metrics, len(status.metrics)) or "-"),
        ("time", _time(status.goodput)),
        ("directory", one_line(status.directory)),
    ]
    below = "\n" + " " * _VALUE_COLUMN
    return "\n".join([one_line(status.run_id), *(f"  {name:<16} {text}".replace("\n", below) for name, text in rows)])


def _ranks(status: RunStatus) -> list[tuple[str, str]]:
    """The number of ranks, for a run that has not reported its precision and batch yet."""
    return [("ranks", str(status.world_size))] if status.world_size else []


def _speed(status: RunStatus) -> str:
    """How fast it trains, and when it will be done."""
    parts = [f"{status.samples_per_second:,.0f} samples/s"] if status.samples_per_second else []
    if status.seconds_left is not None:
        ends = moment(time.time() + status.seconds_left)
        parts.append(f"{duration(status.seconds_left)} left, until about {ends}")
    return ", ".join(parts)


def _failed_before(status: RunStatus) -> bool:
    """Whether something has failed that the reason of the run's state does not tell."""
    return status.last_failure is not None and status.last_failure.partition(": ")[2] not in (status.reason or "")


def _columns(found: list[RunStatus]) -> dict[str, list[str]]:
    """The cells of the table by heading, each whole and in one line."""
    rows = [
        {
            "RUN": one_line(status.run_id),
            "STATE": status.state.value,
            "STEP": _progress(status),
            "CHECKPOINT": "-" if status.last_checkpoint is None else str(status.last_checkpoint),
            "ATTEMPTS": str(status.attempts),
            "JOB": status.slurm_job_id or "-",
            "GOODPUT": "-" if status.goodput.ratio is None else f"{status.goodput.ratio:.0%}",
            "METRICS": show_metrics(status.metrics),
            "REASON": one_line(" ".join((status.reason or "").split())),
        }
        for status in found
    ]
    return {heading: [row[heading] for row in rows] for heading in rows[0]}


def _line(status: RunStatus) -> str:
    progress = f"progress {_UNKNOWN}" if status.reports_nothing else f"step {_progress(status)}"
    parts = (status.run_id, status.state.value, progress, show_metrics(status.metrics))
    return "  ".join(one_line(part) for part in (*parts, status.reason or "") if part)


def _progress(status: RunStatus) -> str:
    if status.step is None:
        return "-"
    if not status.total_steps:
        return str(status.step)
    return f"{status.step} of {status.total_steps} ({status.step / status.total_steps:.0%})"


def _age(status: RunStatus) -> str:
    """For how long a training has reported no step, if for a while: it may be slow, or hang."""
    age = 0.0 if status.reported is None else time.time() - status.reported
    if age <= _STALE_SECONDS:
        return ""
    return f", no {'step' if status.step is None else 'further one'} reported for {duration(age)}"


def _time(good: Goodput) -> str:
    spent = f"{duration(good.running_seconds)} running"
    if good.productive_seconds is not None and good.lost_seconds is not None:
        spent = f"{duration(good.productive_seconds)} productive, {duration(good.lost_seconds)} lost"
    ratio = "" if good.ratio is None else f": {good.ratio:.0%} goodput"
    return f"{spent}, {duration(good.waiting_seconds)} waiting{ratio}"
