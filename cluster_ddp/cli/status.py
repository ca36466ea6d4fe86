"""``cluster-ddp status``: the state of runs."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cluster_ddp.cli.options import Runs
from cluster_ddp.cli.output import inform, show, show_json
from cluster_ddp.cli.overview import Overview
from cluster_ddp.cli.run_states import K, SlurmJobs, ask_slurm, describe_with, show_metrics, sweep_lines
from cluster_ddp.cli.screen import alternate_screen, draw, is_screen
from cluster_ddp.printing import one_line, printable
from cluster_ddp.run.goodput import Goodput
from cluster_ddp.run.jobs import know
from cluster_ddp.run.runs import find_run, runs_dir_of
from cluster_ddp.run.state_cache import EndedRuns, Known
from cluster_ddp.run.status import RunStatus
from cluster_ddp.run.sweep import find_sweep, read_sweep
from cluster_ddp.run.sweep_status import NotBegun, SweepCounts, best_of, know_elements
from cluster_ddp.slurm.states import SlurmJob

_REFRESH_SECONDS = 2.0
# Many people watching at once must not slow Slurm's controller down: the run directories tell most of what changes.
_ASK_SLURM_SECONDS = 15.0
# What a narrow terminal shows first, after the run and its state; metrics and reasons get the remaining width.
_BY_IMPORTANCE = ("STEP", "JOB", "CHECKPOINT", "GOODPUT", "ATTEMPTS")
_UNKNOWN = "unknown (the script does not report any)"
_GAP = 2  # between two columns
_VALUE_COLUMN = 19  # of the values in the details of one run
_LEAST_ROOM = 16  # a metric or a reason that is cut shorter is useless


def command(
    runs: Runs = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until nothing more will happen.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; for several runs, a list.")] = False,
) -> None:
    """Show the status of runs: state, step, checkpoint, metrics, lost time."""
    look = Look(runs or [])
    if watch:
        _watch(look, as_json=as_json)
    elif as_json:
        show_json(look.json(look.take()))
    else:
        _print(look.take(), look)


@dataclass(frozen=True)
class Seen:
    """What one look has found."""

    runs: list[RunStatus]
    sweeps: list[SweepCounts]  # besides the runs, where all there is is shown

    @property
    def open(self) -> bool:
        """Whether anything in it will change by itself."""
        return any(status.state.open for status in self.runs) or any(sweep.open for sweep in self.sweeps)


class Look:
    """Looks at what the arguments name repeatedly, and asks Slurm only every so often."""

    def __init__(self, names: list[str]) -> None:
        self.runs_dir = runs_dir_of(None)
        self._names = names
        self._asked_at = -float("inf")
        self._jobs: Mapping[str, SlurmJob] | None = None
        self.sweep = find_sweep(names[0], self.runs_dir) if len(names) == 1 else None
        self.single = len(names) == 1 and self.sweep is None
        self._overview = None if names else Overview(self.runs_dir)
        self._ended = EndedRuns(self.runs_dir if self.sweep is None else self.sweep.path)

    def take(self) -> Seen:
        """The states now."""
        if self._overview is not None:
            everything = self._overview.know()
            found = self._describe(everything, self._overview.describe)
            self._overview.save(everything)
            return Seen(*self._overview.divide(everything, found))
        known = self._known()
        seen = Seen(self._describe(known, self._ended.describe), [])
        if self.sweep is not None:  # all runs of the folder
            self._ended.save([run.run for run in known if not isinstance(run, NotBegun)])
        return seen

    def json(self, seen: Seen) -> Any:
        """An object for one run that was named, a list for several."""
        values = [status.to_json() for status in seen.runs]
        values += [{**sweep.as_run().to_json(), "elements": sweep.to_json()} for sweep in seen.sweeps]
        return values[0] if self.single else values

    def best(self, found: list[RunStatus]) -> list[str]:
        """The line below a sweep's table that names the best element."""
        best = best_of(found, read_sweep(self.sweep)) if self.sweep is not None else None
        if best is None:
            return []
        status, metric = best
        return ["", f"best by {one_line(metric)}: {one_line(status.run_id)}  {status.metrics[metric]:.4g}"]

    def _describe(self, known: Sequence[K], describe: Callable[[K, SlurmJobs], RunStatus]) -> list[RunStatus]:
        if time.monotonic() - self._asked_at >= _ASK_SLURM_SECONDS:
            self._jobs = ask_slurm(known)
            self._asked_at = time.monotonic()
        return describe_with(known, self._jobs, describe)

    def _known(self) -> Sequence[Known]:
        if self.sweep is not None:
            return know_elements(self.sweep, read_sweep(self.sweep), self._ended.know)
        return [know(run) for run in dict.fromkeys(find_run(name, self.runs_dir) for name in self._names)]


def _print(seen: Seen, look: Look) -> None:
    if not seen.runs and not seen.sweeps:
        inform(f"no runs in {look.runs_dir} (set CLUSTER_DDP_RUNS to use another folder)")
    show(*_lines(seen, look))


def _lines(seen: Seen, look: Look) -> list[str]:
    """The details of a run, or the table of several runs and a line for each sweep."""
    if look.single:
        return _detail(seen.runs[0]).split("\n")
    return [*_runs_table(seen.runs), *look.best(seen.runs), *sweep_lines(seen.sweeps)]


def _runs_table(found: list[RunStatus]) -> Iterator[str]:
    if not found:
        return iter(())
    columns = _columns(found)
    if sys.stdout.isatty():
        widths = _fitted(columns, shutil.get_terminal_size().columns)
    else:  # a pipe takes lines of any length
        widths = {heading: _width(heading, cells) for heading, cells in columns.items()}
    return _table(columns, widths)


def _watch(look: Look, *, as_json: bool) -> None:
    """Show the states until no run will change by itself any more, or the person presses Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not is_screen():
            _watch_changes(look, as_json=as_json)
        else:
            _watch_in_place(look)


def _watch_in_place(look: Look) -> None:
    seen = None
    try:
        with alternate_screen():
            for seen in _looks(look):
                draw([printable(line) for line in _lines(seen, look)])
    finally:
        if seen is not None:
            _print(seen, look)  # what was seen last stays in view


def _watch_changes(look: Look, *, as_json: bool) -> None:
    shown = ""
    for seen in _looks(look):
        lines = [*map(_line, seen.runs), *sweep_lines(seen.sweeps)]
        text = json.dumps(look.json(seen)) if as_json else "\n".join(lines)
        if text != shown:
            show(text)
            sys.stdout.flush()
            shown = text


def _looks(look: Look) -> Iterator[Seen]:
    """Look every so often, as long as anything may change by itself."""
    while True:
        seen = look.take()
        yield seen
        if not seen.open:
            return
        time.sleep(_REFRESH_SECONDS)


def _detail(status: RunStatus) -> str:
    rows = [
        ("state", status.state.value + (f" ({status.reason})" if status.reason else "")),
        *(("warning", one_line(text)) for text in status.warnings),
        *([("progress", _UNKNOWN)] if status.reports_nothing else [("step", _progress(status))]),
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
    """Of a training that has not said how it trains."""
    return [("ranks", str(status.world_size))] if status.world_size else []


def _speed(status: RunStatus) -> str:
    """How fast it trains, and when it will be done."""
    parts = [f"{status.samples_per_second:,.0f} samples/s"] if status.samples_per_second else []
    if status.seconds_left is not None:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + status.seconds_left))
        parts.append(f"{_duration(status.seconds_left)} left, until about {ends}")
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


def _fitted(columns: dict[str, list[str]], width: int) -> dict[str, int]:
    """The columns that a terminal of `width` shows, and how wide each is.

    States are shown whole if at all possible, then run ids. Of the other columns, those that are not empty follow as
    far as there is room.
    """
    widths = {"STATE": min(_width("STATE", columns["STATE"]), width)}
    room = width - widths["STATE"]
    widths["RUN"] = max(min(_width("RUN", columns["RUN"]), room - _GAP), 1)
    room -= widths["RUN"] + _GAP
    shown = {heading: _width(heading, cells) for heading, cells in columns.items() if set(cells) - {"", "-"}}
    for heading in _BY_IMPORTANCE:
        if heading in shown and shown[heading] + _GAP <= room:
            widths[heading] = shown[heading]
            room -= shown[heading] + _GAP
    cut = [heading for heading in ("REASON", "METRICS") if heading in shown]
    if room < len(cut) * (_LEAST_ROOM + _GAP):
        cut = cut[:1]
    for sharing, heading in zip(range(len(cut), 0, -1), sorted(cut, key=shown.__getitem__), strict=True):
        share = min(shown[heading], room // sharing - _GAP)
        if share >= min(shown[heading], _LEAST_ROOM):
            widths[heading] = share
            room -= share + _GAP
    return {heading: widths[heading] for heading in columns if heading in widths}


def _table(columns: dict[str, list[str]], widths: dict[str, int]) -> Iterator[str]:
    """The lines of the table; rich takes longer to lay out a thousand lines than it takes to read the runs."""
    gap = " " * _GAP
    for cells in zip(*([heading, *columns[heading]] for heading in widths), strict=True):
        yield gap.join(map(_fit, cells, widths.values()))


def _fit(cell: str, width: int) -> str:
    """A cell as wide as its column: filled up, or cut with an ellipsis."""
    if cell.isascii() and len(cell) <= width:
        return cell.ljust(width)
    from rich.cells import set_cell_size

    return set_cell_size(cell, width) if _cells(cell) <= width else set_cell_size(cell, width - 1) + "…"


def _width(heading: str, cells: list[str]) -> int:
    return max(map(_cells, (heading, *cells)))


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


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


def _time(good: Goodput) -> str:
    spent = f"{_duration(good.running_seconds)} running"
    if good.productive_seconds is not None and good.lost_seconds is not None:
        spent = f"{_duration(good.productive_seconds)} productive, {_duration(good.lost_seconds)} lost"
    ratio = "" if good.ratio is None else f": {good.ratio:.0%} goodput"
    return f"{spent}, {_duration(good.waiting_seconds)} waiting{ratio}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
