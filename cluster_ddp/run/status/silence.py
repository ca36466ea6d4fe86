"""The nodes of a run that should give a sign of life and do not."""

from __future__ import annotations

import os
import tempfile
import time

from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import NODE_STARTED
from cluster_ddp.run.history import History
from cluster_ddp.words import listed

_SILENT_AFTER_SECONDS = 120.0  # nodes touch their file every few seconds; network storage may show it a minute late
_NAMED = 3


def silent_nodes(history: History) -> str | None:
    """Name the nodes of the last attempt that have given no sign of life for minutes; None if all do."""
    if history.last is None:
        return None
    attempt = history.run.attempt(history.last.number)
    touched: dict[str, float] = {}
    for event in history.of_attempt(attempt.number, NODE_STARTED):
        node = event.get("node")
        if isinstance(node, int) and (moment := _touched(attempt, node)) is not None:
            host = str(event.get("host") or f"node {node}")
            touched[host] = min(moment, touched.get(host, moment))
    silent = _silent(touched, time.time())
    if silent:  # or this machine's clock is ahead of the storage's
        silent = _silent(touched, _storage_time(attempt))
    if not silent:
        return None
    said = f"no sign of life from {listed(silent, _NAMED)} for {min(silent.values()) / 60:.0f} min: "
    if history.last.slurm_job_id is None:
        return f"{said}it hangs, its storage or the terminal that it prints to does not respond, or it is down"
    return f"{said}it hangs, or its storage does not respond; Slurm may be unable to end such a job until it does"


def _silent(touched: dict[str, float], now: float) -> dict[str, float]:
    """Return for how long each silent host has been so."""
    now = max([now, *touched.values()])  # this machine's clock may be behind the storage's
    return {host: now - moment for host, moment in touched.items() if now - moment > _SILENT_AFTER_SECONDS}


def _storage_time(attempt: AttemptDirectory) -> float:
    """Return the time by the clock that dates the nodes' files; this machine's if nothing can be written there."""
    try:
        with tempfile.TemporaryFile(dir=attempt.path) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _touched(attempt: AttemptDirectory, node: int) -> float | None:
    """Return when a node program last touched its file; None if it has signed off or not started yet."""
    try:
        return attempt.alive_file(node).lstat().st_mtime
    except OSError:
        return None
