"""``python -m cluster_ddp.launch.attempt``: what a batch script does around the ranks, in three short calls.

    begin RUN_DIR                        prints the number of the attempt that this allocation now is, or begins none
                                         and prints avoid and the hosts that have failed more than once, if this
                                         allocation has one of them; it does so once
    stop RUN_DIR N --reason ...          asks all nodes of the attempt to save and end
    end RUN_DIR N                        judges the attempt and prints one word: done, requeue, stop, fail or stall,
                                         and behind requeue the hosts that have failed more than once, if any

`begin` waits for a while for room on a full disk. It prints nothing, and ends with status 0, when the run is complete;
75 when another attempt is alive; 76 when only a person may start the run again.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.launch.avoid import hosts_to_avoid
from cluster_ddp.launch.lost import record_lost_nodes
from cluster_ddp.leave import leave
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded, RunError
from cluster_ddp.run.events import (
    COMPLETED,
    NODE_FINISHED,
    NODE_STARTED,
    STOPPED,
    EventWriter,
    login_writer,
    read_events,
)
from cluster_ddp.run.history import read_history
from cluster_ddp.run.record import read_record
from cluster_ddp.run.stopfile import REASONS, SAVE_AND_END, TERMINATED, request_stop
from cluster_ddp.run.suspects import suspects
from cluster_ddp.spec.errors import ClusterDDPError

if TYPE_CHECKING:
    from cluster_ddp.run.verdict import Verdict

ALIVE_STATUS = 75
ENDED_STATUS = 76
_SQUEUE_SECONDS = 20.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_SECONDS = 900.0
_ROOM_POLL_SECONDS = 1.0
# Slurm's states of a job whose processes may run.
_ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "CONFIGURING", "STAGE_OUT", "RESIZING"}


def begin(run: RunDirectory) -> AttemptDirectory:
    """Begin the attempt that this allocation, or this process, is; the same allocation gets the same one again.

    Raises
    ------
    RunAlive, RunEnded, RunError
        As `begin_attempt` says.
    """
    environment = os.environ
    pid = environment.get("SLURM_TASK_PID", "")
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    attempt = begin_attempt(
        run,
        slurm_job_id=environment.get("SLURM_JOB_ID"),
        restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0),
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        # The batch script: this process ends at once. Slurm names it; a shell may have forked on the way to here.
        pid=int(pid) if pid.isdigit() else os.getppid(),
        nodes=int(nodes) if nodes.isdigit() else None,
        procs=read_record(run).procs,
        job_alive=_job_alive,
    )
    if attempt.number and "SLURM_JOB_ID" in environment:
        record_lost_nodes(read_history(run), run.attempt(attempt.number - 1), EventWriter(run, login_writer()))
    return attempt


def _begin_when_there_is_room(run: RunDirectory, patience: float) -> AttemptDirectory:
    """Begin the attempt; a full disk is waited for, since ending the job now would end the run for good."""
    deadline, said = time.monotonic() + patience, False
    while True:
        try:
            return begin(run)
        except (RunError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in _FULL) or time.monotonic() > deadline:
                raise
            if not said:
                print(f"cluster-ddp: {error}; waiting up to {patience:.0f} s for room", file=sys.stderr, flush=True)
            said = True
            time.sleep(_ROOM_POLL_SECONDS)


def end(attempt: AttemptDirectory, *, writer: str) -> Verdict:
    """Judge an attempt whose processes have ended, and record the verdict.

    Parameters
    ----------
    writer
        The name under which this process writes events.
    """
    from cluster_ddp.run.verdict import conclude

    events = EventWriter(attempt.run, writer)
    speak_for_script(attempt, events)
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return conclude(attempt, writer=writer)
    record_lost_nodes(read_history(attempt.run), attempt, events)
    return conclude(attempt, writer=writer, job_runs=lambda: _job_states(job_id) == {"RUNNING"})


def speak_for_script(attempt: AttemptDirectory, writer: EventWriter) -> None:
    """Record that a script has completed, or was stopped, if it has not said so itself.

    A script that knows nothing of this package leaves no word of its end; what its node programs saw stands for it.
    """
    events = [event for event in read_events(attempt.run) if event.get("attempt") == attempt.number]
    started = {event.get("node") for event in events if event["event"] == NODE_STARTED and event.get("script")}
    finished = {event.get("node"): event for event in events if event["event"] == NODE_FINISHED}
    said = {event["event"] for event in events}
    if not started or said & {COMPLETED, STOPPED} or started != set(finished):
        return
    outcomes = {event.get("outcome") for event in finished.values()}
    if outcomes == {"done"}:
        writer.write(COMPLETED, attempt=attempt.number, step=None)
    elif outcomes <= {"done", "stopped", "killed"}:
        reasons = [event["reason"] for event in finished.values() if event.get("reason")]
        writer.write(STOPPED, attempt=attempt.number, step=None, reason=reasons[0] if reasons else TERMINATED)


def _job_alive(job_id: str) -> bool | None:
    """Ask Slurm about one job; None when it cannot be asked."""
    states = _job_states(job_id)
    return None if states is None else not _ACTIVE.isdisjoint(states)


def _job_states(job_id: str) -> set[str] | None:
    """Slurm's states of a job, none when it does not know it; None when it cannot be asked."""
    command = ["squeue", "--noheader", "--format=%T", "--states=all", f"--jobs={job_id}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return set() if "Invalid job id" in done.stderr else None
    return set(done.stdout.split())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster_ddp.launch.attempt")
    commands = parser.add_subparsers(dest="command", required=True)
    begins = commands.add_parser("begin")
    begins.add_argument("run", type=Path)
    begins.add_argument("--patience", type=float, default=_ROOM_SECONDS, help="seconds to wait on a full disk")
    ends = commands.add_parser("end")
    stops = commands.add_parser("stop")
    for command in (ends, stops):
        command.add_argument("run", type=Path)
        command.add_argument("number", type=int)
    stops.add_argument("--reason", required=True, choices=REASONS)
    stops.add_argument("--level", type=int, default=SAVE_AND_END, choices=(1, 2))
    stops.add_argument("--grace", type=float, default=None, help="seconds until the processes are killed")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``python -m cluster_ddp.launch.attempt``."""
    parsed = _parser().parse_args(arguments)
    run = RunDirectory(parsed.run.absolute())
    try:
        if parsed.command == "begin":
            bad = hosts_to_avoid(run)
            print(" ".join(["avoid", *bad]) if bad else _begin_when_there_is_room(run, parsed.patience).number)
        elif parsed.command == "stop":
            by = f"{parsed.command} on {socket.gethostname()}"
            attempt = run.attempt(parsed.number)
            request_stop(attempt, reason=parsed.reason, level=parsed.level, grace=parsed.grace, by=by)
        else:
            verdict = end(run.attempt(parsed.number), writer=f"batch-{os.environ.get('SLURM_JOB_ID', os.getpid())}")
            print(f"cluster-ddp: attempt {parsed.number}: {verdict.action}: {verdict.reason}", file=sys.stderr)
            bad = suspects(read_history(run), parsed.number) if verdict.action == "requeue" else []
            print(" ".join([verdict.action, *bad]))
    except RunAlive as error:
        return _refuse(error, ALIVE_STATUS)
    except RunEnded as error:
        return _refuse(error, 0 if error.state == "COMPLETED" else ENDED_STATUS)
    except ClusterDDPError as error:
        return _refuse(error, error.exit_status)
    return 0


def _refuse(error: ClusterDDPError, status: int) -> int:
    print(f"cluster-ddp: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
