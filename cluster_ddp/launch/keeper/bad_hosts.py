"""Finds hosts on which a run keeps failing, from its record and from Slurm, and decides when to avoid them.

When an attempt has ended, its keeper excludes them from the requeued job. If the batch host died, or Slurm requeued the
job on its own, no keeper could do that, and the next start is the first that can.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from cluster_ddp.errors import Cause
from cluster_ddp.launch.keeper.lost_nodes import record_lost_nodes
from cluster_ddp.run.attempt import is_earlier_start
from cluster_ddp.run.causes import came_from_outside, failures_of, root_failure
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import finished_a_step, refuse_ended
from cluster_ddp.run.events import (
    HOST_SUSPECTED,
    NODE_LOST,
    NODE_TAKEN,
    EventWriter,
    login_writer,
)
from cluster_ddp.run.history import History, read_history
from cluster_ddp.slurm.nodelist import short_name
from cluster_ddp.slurm.start import SlurmStart

_MIN_FAILED_ATTEMPTS = 2  # on a host: a single one may be bad luck


def bad_hosts(history: History, upto: int) -> list[str]:
    """Return the hosts that ended more than one attempt, as far as is known, or ran on after a newer one had begun.

    Parameters
    ----------
    upto
        The last attempt to look at; those before the last `resume` do not count.
    """
    numbers = range(history.first_number, upto + 1)
    failed_starts = _hosts_of_failed_starts(history, numbers)
    counts = Counter(
        host for number in numbers for host in _hosts_at_fault(history, number) or failed_starts.get(number, set())
    )
    cut_off = {
        short_name(event.get("host")) for number, event in history.ran_on() if number <= upto and event.get("host")
    }
    return sorted({host for host, count in counts.items() if count >= _MIN_FAILED_ATTEMPTS} | cut_off)


def _hosts_at_fault(history: History, number: int) -> set[str]:
    if history.of_attempt(number, NODE_TAKEN):  # the other events are consequences
        return set()
    lost = {str(event["host"]) for event in history.of_attempt(number, NODE_LOST) if event.get("host")}
    failures = failures_of(history, number)
    if lost or not failures:
        return lost
    root = root_failure(failures)
    host, broken = root.get("host"), root.get("suspect") or root.get("cause") == Cause.HOST
    return {short_name(host)} if isinstance(host, str) and broken else set()


def _hosts_of_failed_starts(history: History, numbers: Iterable[int]) -> dict[int, set[str]]:
    """Return, by attempt, the host on which the program failed before its first step though it has trained before.

    A package, a library or data may be missing there, or differ. If the same happens on another host before training
    goes on, the fault is the program's, such as in its load_state_dict().
    """
    found: dict[int, set[str]] = {}
    for has_trained, series in itertools.groupby(numbers, key=lambda number: finished_a_step(history, number)):
        hosts = {} if has_trained else {number: _cannot_begin(history, number) for number in series}
        if len(set[str]().union(*hosts.values())) == 1:
            found |= hosts
    return found


def _cannot_begin(history: History, number: int) -> set[str]:
    """Return the hosts of the program's own errors in an attempt without a step, if it has trained before."""
    if not any(finished_a_step(history, earlier) for earlier in range(number)):
        return set()
    if history.of_attempt(number, NODE_LOST, NODE_TAKEN):  # the errors are consequences
        return set()
    own = [event for event in failures_of(history, number) if not came_from_outside(event)]
    return {short_name(event["host"]) for event in own if event.get("host")}


def enough_others(usable: set[str], *, bad: Iterable[str], excluded: Iterable[str], nodes: int) -> bool:
    """Whether enough nodes are left for a job besides the bad ones and those that it already excludes."""
    return len(usable - set(bad) - set(excluded)) >= nodes


def hosts_to_avoid(run: RunDirectory, start: SlurmStart) -> list[str]:
    """Return all bad hosts of the run if Slurm has started its job on one of them again, else none.

    Call it before the attempt is begun. It returns a host only once since the last `resume`, and records that, so that
    a job which Slurm keeps starting on a host is not requeued forever.

    Raises
    ------
    RunEnded
        Only a person may restart the run, or it is complete.
    RunError
        Storage does not let the events be read, which may pass.
    """
    history = read_history(run, strict=True)
    last = history.last
    if start.restart_count == 0 or last is None or not is_earlier_start(last, start.task, start.restart_count):
        return []
    refuse_ended(history)
    events = EventWriter(run, login_writer())
    if record_lost_nodes(history, run.attempt(last.number), events, restarted=True):
        history = read_history(run)
    bad = bad_hosts(history, last.number)
    new = (set(bad) & set(map(short_name, start.hosts)) if bad else set()) - _avoided_before(history)
    # A host that cannot be recorded (disk full) would be returned again and again.
    recorded = [
        events.write(HOST_SUSPECTED, attempt=last.number, host=host, slurm_job_id=start.task) for host in sorted(new)
    ]
    return bad if recorded and all(recorded) else []


def _avoided_before(history: History) -> set[str]:
    """Return the hosts that `hosts_to_avoid` has returned before."""
    events = [event for event in history.events if event["event"] == HOST_SUSPECTED]
    return {str(event.get("host")) for event in events if (event.get("attempt") or 0) >= history.first_number}
