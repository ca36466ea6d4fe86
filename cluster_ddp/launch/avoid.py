"""Hosts that a started job had better give back: they have failed the run more than once.

A batch script that ends keeps the queued job from them itself. Where the batch host has died, or Slurm has queued the
job again for another reason of its own, nobody could, and the next start is the first that can tell.
"""

from __future__ import annotations

import os

from cluster_ddp.launch.lost import record_lost_nodes
from cluster_ddp.run.attempt import is_earlier_start
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import HOST_SUSPECTED, EventWriter, login_writer
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.outcome import refuse_ended
from cluster_ddp.run.suspects import suspects


def hosts_to_avoid(run: RunDirectory) -> list[str]:
    """All suspects of the run, if Slurm has started its job again on one of them; none otherwise.

    Call it before the attempt is begun. It asks once for each host since a person's last resume, and records that, so
    that a job which Slurm does not keep from a host is not requeued for ever.

    Raises
    ------
    RunEnded
        Only a person may start the run again, or it is complete.
    """
    job_id, restarts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if job_id is None or restarts == 0:
        return []
    history = read_history(run)
    last = history.last
    if last is None or not is_earlier_start(last, job_id, restarts):
        return []
    refuse_ended(history)
    events = EventWriter(run, login_writer())
    if record_lost_nodes(history, run.attempt(last.number), events):
        history = read_history(run)
    bad = suspects(history, last.number)
    new = (set(bad) & _allocation() if bad else set()) - _asked(history)
    # What cannot be recorded (a full disk) could be asked for ever.
    said = [events.write(HOST_SUSPECTED, attempt=last.number, host=host, slurm_job_id=job_id) for host in sorted(new)]
    return bad if said and all(said) else []


def _asked(history: History) -> set[str]:
    """The hosts that were to be avoided already."""
    events = [event for event in history.events if event["event"] == HOST_SUSPECTED]
    return {str(event.get("host")) for event in events if (event.get("attempt") or 0) >= history.first_number}


def _allocation() -> set[str]:
    """The hosts of this job; none where Slurm's list cannot be read."""
    from cluster_ddp.slurm.nodelist import NodeListError, expand  # only where there are suspects

    try:
        return set(expand(os.environ.get("SLURM_JOB_NODELIST", "")))
    except (NodeListError, ImportError):
        return set()
