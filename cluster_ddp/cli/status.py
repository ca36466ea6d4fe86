"""``cluster-ddp status``: where runs stand."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster_ddp.cli.described import ask_slurm
from cluster_ddp.run.directory import RunDirectory, find_run, find_sweep, list_runs, runs_dir_of
from cluster_ddp.run.state import RunStatus, SlurmJobLike, describe, telling_first

if TYPE_CHECKING:
    from rich.table import Table

_REFRESH_SECONDS = 2.0
# Many people watching at once must not slow Slurm's controller down: the run directories tell most of what changes.
_ASK_SLURM_SECONDS = 15.0
_METRICS_SHOWN = 4


def command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run directory, run id, unique prefix of one, or a sweep. Default: all."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until nothing is left to happen.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; of several runs a list.")] = False,
) -> None:
    """Show where runs stand: state, step, checkpoint, metrics, lost time."""
    look = _Look(runs or [])
    if watch:
        _watch(look, as_json=as_json)
    elif as_json:
        print(json.dumps(look.json(look.take()), indent=2))
    else:
        _print(look.take(), look)


class _Look:
    """Looks at what the arguments name, again and again; asks Slurm only every so often."""

    def __init__(self, names: list[str]) -> None:
        self.runs_dir = runs_dir_of(None)
        self._names = names
        self._asked_at = -float("inf")
        self._jobs: Mapping[str, SlurmJobLike] | None = None
        self.single = len(names) == 1 and find_sweep(names[0], self.runs_dir) is None

    def take(self) -> list[RunStatus]:
        """The states now."""
        runs = self._runs()
        if time.monotonic() - self._asked_at >= _ASK_SLURM_SECONDS:
            self._jobs = ask_slurm(runs)
            self._asked_at = time.monotonic()
        return [describe(run, self._jobs) for run in runs]

    def json(self, found: list[RunStatus]) -> Any:
        """An object for one run that was named, a list for several."""
        values = [status.to_json() for status in found]
        return values[0] if self.single else values

    def _runs(self) -> list[RunDirectory]:
        if not self._names:
            return list_runs(self.runs_dir)
        runs: list[RunDirectory] = []
        for name in self._names:
            sweep = find_sweep(name, self.runs_dir)
            runs += [find_run(name, self.runs_dir)] if sweep is None else list_runs(sweep)
        return list(dict.fromkeys(runs))


def _print(found: list[RunStatus], look: _Look) -> None:
    if not found:
        print(f"no runs in {look.runs_dir} (CLUSTER_DDP_RUNS names another folder)", file=sys.stderr)
    elif look.single:
        print(_detail(found[0]))
    else:
        from rich.console import Console

        # Cut to the terminal's width for a person; whole for a pipe.
        Console(width=None if sys.stdout.isatty() else 240).print(_table(found))


def _watch(look: _Look, *, as_json: bool) -> None:
    """Show the states until no run will change by itself any more, or the person has seen enough (Ctrl-C)."""
    live = sys.stdout.isatty() and not as_json
    shown = ""
    try:
        while True:
            found = look.take()
            if live:
                print("\x1b[H\x1b[2J", end="")
                _print(found, look)
            elif (text := json.dumps(look.json(found)) if as_json else "\n".join(map(_line, found))) != shown:
                print(text, flush=True)
                shown = text
            if not any(status.state.open for status in found):
                return
            time.sleep(_REFRESH_SECONDS)
    except KeyboardInterrupt:
        return


def _detail(status: RunStatus) -> str:
    good = status.goodput
    rows = [
        ("state", status.state.value + (f" ({status.reason})" if status.reason else "")),
        ("step", _progress(status)),
        ("samples", "-" if status.samples is None else f"{status.samples:,}"),
        ("last checkpoint", "none" if status.last_checkpoint is None else f"step {status.last_checkpoint}"),
        ("attempts", str(status.attempts)),
        ("Slurm job", status.slurm_job_id or "-"),
        ("metrics", _metrics(status, len(status.metrics)) or "-"),
        (
            "time",
            f"{_duration(good.productive_seconds)} productive, {_duration(good.lost_seconds)} lost, "
            f"{_duration(good.waiting_seconds)} waiting"
            + ("" if good.ratio is None else f": {good.ratio:.0%} goodput"),
        ),
        ("directory", status.directory),
    ]
    return "\n".join([status.run_id, *(f"  {name:<16} {text}" for name, text in rows)])


def _table(found: list[RunStatus]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("RUN", "STATE", "STEP", "CHECKPOINT", "ATTEMPTS", "JOB", "GOODPUT", "METRICS", "REASON"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis" if heading in ("METRICS", "REASON") else "fold")
    for status in found:
        good = status.goodput.ratio
        cells = (
            status.run_id,
            status.state.value,
            _progress(status),
            "-" if status.last_checkpoint is None else str(status.last_checkpoint),
            str(status.attempts),
            status.slurm_job_id or "-",
            "-" if good is None else f"{good:.0%}",
            _metrics(status, _METRICS_SHOWN),
            status.reason or "",
        )
        table.add_row(*map(Text, cells))
    return table


def _line(status: RunStatus) -> str:
    parts = (status.run_id, status.state.value, f"step {_progress(status)}", _metrics(status, _METRICS_SHOWN))
    return "  ".join(part for part in (*parts, status.reason or "") if part)


def _progress(status: RunStatus) -> str:
    if status.step is None:
        return "-"
    if not status.total_steps:
        return str(status.step)
    return f"{status.step} of {status.total_steps} ({status.step / status.total_steps:.0%})"


def _metrics(status: RunStatus, count: int) -> str:
    names = sorted(status.metrics, key=telling_first)
    return "  ".join(f"{name} {status.metrics[name]:.4g}" for name in names[:count])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
