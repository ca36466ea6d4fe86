"""Recognizes a run whose nodes have ended but whose keeper or job has not: it is deciding, waiting, or left behind."""

from __future__ import annotations

import time

from cluster_ddp.run.events import (
    COMPLETED,
    NODE_FINISHED,
    NODE_STARTED,
    REQUEUE_DELAYED,
    REQUEUE_FAILED,
    REQUEUED,
    STALLED,
)
from cluster_ddp.run.history import History
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.status.silence import silent_nodes
from cluster_ddp.run.stopfile import FINAL_REASONS
from cluster_ddp.slurm.states import LETS_RUN, SlurmJob

_DECIDED_SOON_SECONDS = 120.0  # in the ordinary case; network storage may show a file a minute late
_DECIDED_SECONDS = 300.0  # a keeper asks Slurm several questions, each of which may take a minute


def waits_for_requeue(history: History) -> str | None:
    """Say why the last attempt, which is over, still waits to be requeued; None if it does not."""
    why = why_delayed(history)
    return why and f"trying to requeue the job until the allocation is nearly over: {why}"


def why_delayed(history: History) -> str | None:
    """Return why the last attempt could not be requeued immediately, if it is still waiting; else None."""
    if history.last is None:
        return None
    said = history.of_attempt(history.last.number, REQUEUE_DELAYED, REQUEUED, REQUEUE_FAILED)
    if not said or said[-1]["event"] != REQUEUE_DELAYED:
        return None
    request = history.stop_request
    if request is not None and request.reason in FINAL_REASONS:  # somebody has ended the waiting
        return None
    return str(said[-1].get("reason"))


def is_deciding_or_waiting(history: History) -> bool:
    """Whether a keeper may still requeue the last attempt, whose nodes have ended."""
    return why_delayed(history) is not None or is_deciding(history)


def is_deciding(history: History) -> bool:
    """Whether the last attempt's nodes signed off a moment ago, so that its keeper may not have decided yet."""
    last = history.last
    if last is None or last.ended is not None:
        return False
    said = history.of_attempt(last.number, NODE_FINISHED, REQUEUED, REQUEUE_FAILED, STALLED, COMPLETED)
    if not said or said[-1]["event"] != NODE_FINISHED:
        return False
    return time.time() - float(said[-1]["time"]) < _DECIDED_SECONDS


def nodes_have_ended(history: History) -> str | None:
    """Say that nothing of the last attempt runs any more on its nodes, while its job does; None if something does.

    A keeper that cannot record what it has decided, since storage is full, leaves no other trace; nor does a job that
    Slurm has started again, until its attempt begins.
    """
    last = history.last
    if last is None or last.nodes is None or last.slurm_job_id is None:
        return None
    started = _started_nodes(history)
    if len(started) < last.nodes or _has_not_signed_off(history, started):
        return None
    if time.time() - _changed(history) < _DECIDED_SOON_SECONDS:
        return None
    host = last.process.host if last.process else "the batch host"
    return (
        f"attempt {last.number} has ended on its nodes: its keeper on {host} decides what follows, or its job is "
        "starting again and waits, for example for free space; if this lasts, see its Slurm output"
    )


def left_behind(history: History, job: SlurmJob | None) -> str | None:
    """Say why a job still holds its nodes minutes after its run has ended; None if none does.

    Its ranks may have more to do. If slurmstepd is killed on the batch host, Slurm does not notice that the script has
    ended, perhaps until the job's time limit. Or somebody has stopped the keeper (SIGSTOP).
    """
    last = history.last
    if last is None or job is None or job.state not in LETS_RUN or job.job_id != last.slurm_job_id:
        return None
    latest = max((float(event["time"]) for event in history.of_attempt(last.number)), default=last.begun)
    if time.time() - max(latest, _changed(history)) < _DECIDED_SECONDS:  # the clock of a node may be hours behind
        return None
    if _has_not_signed_off(history, _started_nodes(history)) and silent_nodes(history) is None:
        return (
            f"Slurm job {job.job_id} runs until all ranks have exited: a script may do more after its training, and "
            f"metrics may still be uploaded. To end that: scancel {job.job_id}"
        )
    return (
        f"Slurm job {job.job_id} still holds {job.nodes or 'its nodes'}, though nothing of the run is left there to "
        f"wait for, unless launch.setup has set a trap for EXIT. To end it: scancel {job.job_id}"
    )


def _changed(history: History) -> float:
    """Return when a file of the last attempt was last made or removed, such as that of a node that signs off."""
    assert history.last is not None
    try:
        return history.run.attempt(history.last.number).path.stat().st_mtime
    except OSError:
        return time.time()


def _started_nodes(history: History) -> set[int]:
    """Return the nodes of the last attempt that have said that they started."""
    assert history.last is not None
    told = (as_whole(event.get("node")) for event in history.of_attempt(history.last.number, NODE_STARTED))
    return {node for node in told if node is not None}


def _has_not_signed_off(history: History, nodes: set[int]) -> bool:
    """Whether any of these nodes of the last attempt has not signed off, as far as it could."""
    assert history.last is not None
    attempt = history.run.attempt(history.last.number)
    return any(attempt.alive_file(node).exists() for node in nodes)
