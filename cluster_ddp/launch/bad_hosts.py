"""Hosts on which a run fails: which they are, as far as its record and Slurm can tell, and when to avoid them.

A keeper whose attempt has ended excludes them from the queued job itself. Where the batch host has died, or Slurm has
queued the job again on its own, nobody could do that, and the next start is the first that can.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cluster_ddp.run.attempt import is_earlier_start
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.ending import failures_of, refuse_ended, root_failure
from cluster_ddp.run.events import (
    HANG,
    HOST_SUSPECTED,
    NODE_FAILED,
    NODE_FINISHED,
    NODE_LOST,
    NODE_STARTED,
    RANK_FAILED,
    STOP_REQUESTED,
    EventWriter,
    login_writer,
)
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.stopfile import TERMINATED
from cluster_ddp.slurm.control import down_nodes
from cluster_ddp.slurm.start import SlurmStart

if TYPE_CHECKING:
    from cluster_ddp.launch.running_step import RunningStep

_ENOUGH = 2  # attempts that a host has failed: once may be bad luck
# Errors that a host causes in its ranks. Network errors are not among them: they show on the host that survives.
_SIGNALS = ("SIGKILL", "SIGBUS", "SIGSEGV", "SIGILL")
_BROKEN = re.compile(
    r"killed from outside|\bECC\b|CUDA-capable device|CUDA driver|busy or unavailable|input/output error|stale file",
    re.IGNORECASE,
)


def suspects(history: History, upto: int) -> list[str]:
    """The hosts that ended more than one attempt, as far as is known, or kept running after a newer one had begun.

    Parameters
    ----------
    upto
        The last attempt to look at; those before a person's last request to resume do not count.
    """
    counts = Counter(host for number in range(history.first_number, upto + 1) for host in _culprits(history, number))
    cut_off = {_short(event.get("host")) for number, event in history.ran_on() if number <= upto and event.get("host")}
    return sorted({host for host, count in counts.items() if count >= _ENOUGH} | cut_off)


def _culprits(history: History, number: int) -> set[str]:
    lost = {str(event["host"]) for event in history.of_attempt(number, NODE_LOST) if event.get("host")}
    failures = failures_of(history, number)
    if lost or not failures:
        return lost
    root = root_failure(failures)
    host, error = root.get("host"), str(root.get("error") or "")
    broken = root.get("suspect") or root.get("signal") in _SIGNALS or _BROKEN.search(error)
    return {_short(host)} if isinstance(host, str) and broken else set()


def enough_others(usable: set[str], *, bad: Iterable[str], excluded: Iterable[str], nodes: int) -> bool:
    """Whether a job that needs so many nodes can do without the bad ones and those that it excludes already."""
    return len(usable - set(bad) - set(excluded)) >= nodes


def record_lost_nodes(history: History, attempt: AttemptDirectory, writer: EventWriter) -> bool:
    """Ask Slurm which of the attempt's nodes that never signed off are down, and record them; whether there are any.

    They could not say so themselves.
    """
    events = history.of_attempt(attempt.number)
    if any(event["event"] == NODE_LOST for event in events):
        return False
    finished = {event.get("node") for event in events if event["event"] == NODE_FINISHED}
    started = [event for event in events if event["event"] == NODE_STARTED and event.get("node") not in finished]
    silent = {str(event["host"]).split(".")[0]: event.get("node") for event in started if event.get("host")}
    lost = down_nodes(sorted(silent)) if silent else []
    for host in lost:
        reason = f"node {host} failed: Slurm calls it down"
        writer.write(NODE_LOST, attempt=attempt.number, node=silent.get(host), host=host, reason=reason)
    return bool(lost)


def record_failed_nodes(attempt: AttemptDirectory, writer: EventWriter, start: SlurmStart, step: RunningStep) -> None:
    """Record the nodes that could not report their own end, for a step that has ended.

    A node program that never said that it had started is named with its last words. One that was ended before it had
    come up, because another had failed or the job was stopped, is not recorded.
    """
    history = read_history(attempt.run)
    hosts = host_list(start)
    for node in step.lost:
        host = hosts[node] if node < len(hosts) else f"number {node}"
        reason = f"node {host} was lost: no sign of life, while others had signed off"
        writer.write(NODE_LOST, attempt=attempt.number, node=node, host=host, reason=reason)
    spoke = {_short(event.get("host")) for event in history.of_attempt(attempt.number, NODE_STARTED, NODE_FAILED)}
    if step.lost or len(spoke) >= start.nodes:
        return
    failed = {_short(task.host): task.describe() for task in reversed(step.output.failures())}  # the first words count
    if step.unstarted:
        failed = dict.fromkeys(hosts, "none has within an hour (see the Slurm output)")
    if not failed and not _explained(history, attempt.number) and spoke and spoke <= set(hosts):
        failed = dict.fromkeys(hosts, "it never said that it had started")
    for host in sorted(failed.keys() - spoke):
        error = f"its node program did not start: {failed[host]}"
        writer.write(NODE_FAILED, attempt=attempt.number, host=host, error=error, suspect=True)


def _explained(history: History, number: int) -> bool:
    """Whether an attempt has ended for a reason that explains why some of its nodes had not come up yet."""
    waited = [event for event in history.of_attempt(number, NODE_FAILED) if not event.get("suspect")]
    return any(
        event["event"] != STOP_REQUESTED or not waited or event.get("reason") != TERMINATED
        for event in history.of_attempt(number, STOP_REQUESTED, NODE_FAILED, NODE_LOST, RANK_FAILED, HANG)
        if event not in waited  # a node that the others waited for is just what is looked for
    )


def _short(host: object) -> str:
    """A host's name in Slurm's form; a node may know itself by its full name."""
    return str(host or "").split(".")[0]


def hosts_to_avoid(run: RunDirectory, start: SlurmStart) -> list[str]:
    """All suspects of the run, if Slurm has started its job again on one of them; none otherwise.

    Call it before the attempt is begun. It names a host only once since a person's last resume, and records that, so
    that a job which Slurm keeps starting on a host is not requeued for ever.

    Raises
    ------
    RunEnded
        Only a person may start the run again, or it is complete.
    """
    history = read_history(run)
    last = history.last
    if start.restart_count == 0 or last is None or not is_earlier_start(last, start.task, start.restart_count):
        return []
    refuse_ended(history)
    events = EventWriter(run, login_writer())
    if record_lost_nodes(history, run.attempt(last.number), events):
        history = read_history(run)
    bad = suspects(history, last.number)
    new = (set(bad) & set(host_list(start)) if bad else set()) - _named_before(history)
    # What cannot be recorded (a full disk) would be asked for again and again.
    recorded = [
        events.write(HOST_SUSPECTED, attempt=last.number, host=host, slurm_job_id=start.task) for host in sorted(new)
    ]
    return bad if recorded and all(recorded) else []


def _named_before(history: History) -> set[str]:
    """The hosts that were to be avoided already."""
    events = [event for event in history.events if event["event"] == HOST_SUSPECTED]
    return {str(event.get("host")) for event in events if (event.get("attempt") or 0) >= history.first_number}


def host_list(start: SlurmStart) -> list[str]:
    """The hosts of this start in the order of their node ranks; none where Slurm's list cannot be read."""
    from cluster_ddp.slurm.nodelist import NodeListError, expand  # only where a node is suspected

    try:
        return expand(start.node_list)
    except (NodeListError, ImportError):
        return []
