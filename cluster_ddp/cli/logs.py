"""``cluster-ddp logs``: what a run has printed."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated

import typer

from cluster_ddp.cli.options import Run
from cluster_ddp.cli.output import inform, show
from cluster_ddp.cli.selection import Selection
from cluster_ddp.launch.logs import AttemptLogs
from cluster_ddp.printing import one_line
from cluster_ddp.run.attempt_record import attempt_numbers, list_attempts, read_attempt
from cluster_ddp.run.causes import describe_failure, failures_of, root_failure
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.history import read_history
from cluster_ddp.run.node_log import LogLine
from cluster_ddp.run.runs import find_run, runs_dir_of
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.via import QUEUED

_POLL_SECONDS = 1.0


def command(
    run: Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow, through requeues, until the run is over.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only this attempt. Default: the last.")
    ] = None,
    node: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this node.")] = None,
    rank: Annotated[int | None, typer.Option(metavar="R", min=0, help="Only this rank, without the prefix.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The error of the rank that failed first.")] = False,
) -> None:
    """Show the output of a run's ranks and nodes.

    Each line starts with its rank in brackets; `err` after the rank marks standard error.
    """
    found = find_run(run, runs_dir_of(None))
    number = _attempt(found, attempt)
    if errors:
        _show_errors(found, attempt)
    elif follow and attempt is None:
        _follow(found, node, rank)
    elif number is None:
        inform(
            f"run {found.id} has not started an attempt yet (see cluster-ddp status {found.id}){_batch_output(found)}"
        )
    else:
        _show_all(found, number, node, rank)


def _attempt(run: RunDirectory, wanted: int | None) -> int | None:
    """The number of the attempt that is meant; None when there is none yet."""
    try:
        numbers = attempt_numbers(run)
    except OSError as error:
        raise RunError(f"{run.attempts} cannot be read: {error.strerror or error}") from error
    if wanted is not None and wanted not in numbers:
        there = f"there are {numbers[0]} to {numbers[-1]}" if numbers else "it has not started any"
        raise RunError(f"run {run.id} has no attempt {wanted}: {there}")
    return wanted if wanted is not None else (numbers[-1] if numbers else None)


def _show_all(run: RunDirectory, number: int, node: int | None, rank: int | None) -> None:
    _refuse_missing(run, number, rank)
    logs = AttemptLogs(run.attempt(number), node)
    nodes = logs.nodes()
    if node is not None and node not in nodes:
        there = ", ".join(map(str, nodes[:20])) or "none"
        raise RunError(f"attempt {number} of {run.id} has no log for node {node}; nodes with a log: {there}")
    if not _print(logs, rank, several=node is None and len(nodes) > 1, rest=True):
        who = f"rank {rank} printed nothing" if rank is not None else "nothing was printed"
        where = f" on node {node}" if node is not None else ""
        inform(f"{who}{where} in attempt {number} of {run.id}")


def _refuse_missing(run: RunDirectory, number: int, rank: int | None) -> None:
    """Raise a `RunError` for a rank that the attempt does not have, if it is known how many it has."""
    record = read_attempt(run.attempt(number))
    if rank is not None and record.nodes is not None and record.procs is not None:
        last = record.nodes * record.procs - 1
        if rank > last:
            there = f"ranks 0 to {last}" if last else "rank 0 only"
            raise RunError(f"attempt {number} of {run.id} has no rank {rank}: it has {there}")


def _follow(run: RunDirectory, node: int | None, rank: int | None) -> None:
    """Show new output, attempt after attempt, until nothing more will happen by itself or a person ends it."""
    selection, current, logs = Selection([str(run.path)]), None, None
    try:
        while True:
            (status,) = selection.snapshot().runs  # before the logs, so that all output of a run that is over is read
            if current is None and not status.attempts and status.state.open:
                inform(f"run {run.id} has not started yet: {_state(status)}")
                current = -1
            for number in _newer(run, current):
                if logs is not None:
                    _print(logs, rank, several=node is None, rest=True)
                _refuse_missing(run, number, rank)
                inform(f"--- attempt {number} of {run.id}")
                current, logs = number, AttemptLogs(run.attempt(number), node)
            if logs is not None:
                _print(logs, rank, several=node is None and len(logs.nodes()) > 1, rest=not status.state.open)
                sys.stdout.flush()
            if not status.state.open:
                inform(f"--- run {run.id}: {_state(status)}")
                return
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return


def _newer(run: RunDirectory, current: int | None) -> list[int]:
    """The attempts that have begun since the current one; at first, the last one."""
    numbers = [attempt.number for attempt in list_attempts(run)]
    return numbers[-1:] if current is None else [number for number in numbers if number > current]


def _print(logs: AttemptLogs, rank: int | None, *, several: bool, rest: bool) -> bool:
    """Print what is new; returns whether there was anything."""
    printed = False
    for node, line in logs.lines(rest=rest):
        if rank is None:
            show(_marked(node, line, several=several))
        elif line.rank == rank:
            show(line.text)
        else:
            continue
        printed = True
    return printed


def _marked(node: int, line: LogLine, *, several: bool) -> str:
    """A line with who printed it; with several nodes, those of node programs and torchrun name their node."""
    if line.rank is not None or not several:
        return line.marked()
    return f"[node {node} torchrun] {line.text}" if line.by_torchrun else f"[node {node}] {line.text}"


def _show_errors(run: RunDirectory, wanted: int | None) -> None:
    """The error that caused the others, of the attempt that is meant, else of the last one that has an error."""
    history = read_history(run)
    numbers = [record.number for record in history.attempts if wanted in (None, record.number)]
    for number in reversed(numbers):
        failures = failures_of(history, number)
        if not failures:
            continue
        root = root_failure(failures)
        others = f" ({len(failures) - 1} more followed)" if len(failures) > 1 else ""
        show(f"attempt {number}: {one_line(describe_failure(root))}{others}")
        error = str(root.get("error") or "").strip()
        if "\n" in error:
            show("", error)
        if root.get("log"):
            show("", f"more: {one_line(str(root['log']))}")
        return
    where = f"attempt {wanted}" if wanted is not None else "any attempt"
    inform(f"no rank failed in {where} of {run.id}{_batch_output(run)}")


def _batch_output(run: RunDirectory) -> str:
    """Where the output of the last job's batch script is, if there is any."""
    files = [file for name in QUEUED.values() for file in run.path.glob(name.format(job="*"))]
    last = max(files, key=lambda file: list(map(int, re.findall(r"\d+", file.name))), default=None)
    return f"; for the output of the batch script see {last}" if last is not None else ""


def _state(status: RunStatus) -> str:
    return status.state.value + (f" ({one_line(status.reason)})" if status.reason else "")
