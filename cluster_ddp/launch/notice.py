"""Notifies the user of a run's end: runs the user's own command, with the run's status on standard input.

It affects nothing else: its output is discarded, its time is limited, and a failure becomes a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from typing import TYPE_CHECKING

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.printing import one_line, say
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import NOTIFIED, WARNING, EventWriter
from cluster_ddp.run.history import read_history
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import RunStatus, describe

if TYPE_CHECKING:
    from cluster_ddp.job import NotifySpec

NOTICE_SECONDS = 30.0
_OCCASIONS = {
    RunState.COMPLETED: "completed",
    RunState.FAILED: "failed",
    RunState.LOST: "failed",
    RunState.STALLED: "stalled",
}
_MAX_WORDS = 300


def give_notice(run: RunDirectory, *, writer: str) -> None:
    """Run the command of `notify:` if the run has ended in one of the ways it names; once for each end of an attempt.

    Parameters
    ----------
    writer
        The name under which this process writes events.
    """
    try:
        notify, status = _wanted(run)
        if notify is None or status is None:
            return
        number = read_history(run).last_number
        problem = _run(notify.command, status)
    except (ClusterDDPError, OSError) as error:
        say(f"cluster-ddp: cannot notify anybody: {error}")
        return
    events = EventWriter(run, writer)
    events.write(NOTIFIED, attempt=number, state=status.state.value, error=problem)
    if problem is not None:
        message = f"notify.command: {problem}"
        say(f"cluster-ddp: {one_line(message)}")
        events.write(WARNING, attempt=number, message=message)


def _wanted(run: RunDirectory) -> tuple[NotifySpec | None, RunStatus | None]:
    """Return the notice that the job asks for, and the run's status if it calls for a notice not given yet."""
    from cluster_ddp.job import load_resolved  # loads pydantic, which most starts of a keeper do not need

    notify = load_resolved(run.job_file).notify
    if notify is None:
        return None, None
    status = describe(run, None)
    if _OCCASIONS.get(status.state) not in notify.on:
        return notify, None
    history = read_history(run)
    told = history.of_attempt(history.last_number or 0, NOTIFIED)
    return notify, None if any(event.get("state") == status.state.value for event in told) else status


def _run(command: str, status: RunStatus) -> str | None:
    """Run the command until it ends or its time is up; return what went wrong, None if nothing did."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        told.write(json.dumps(status.to_json()).encode() + b"\n")
        told.seek(0)
        try:
            process = subprocess.Popen(
                ["bash", "-c", command],
                stdin=told,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            code = process.wait(NOTICE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"did not end within {NOTICE_SECONDS:.0f} s and was killed"
        except KeyboardInterrupt:
            return "was interrupted"
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code == 0:
            return None
        said.seek(max(0, said.seek(0, os.SEEK_END) - _MAX_WORDS))
        words = said.read().decode(errors="replace").strip().splitlines()
        return f"exited with status {code}" + (f": {words[-1]}" if words else "")
