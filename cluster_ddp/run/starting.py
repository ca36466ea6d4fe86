"""A start of a run's Slurm job whose ranks do not train yet: what it waits for, or why it has failed."""

from __future__ import annotations

from cluster_ddp.run.events import NODE_STARTED, REQUEUED, RESUMED, START_FAILED, STARTED
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.record import RunRecord
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.via import QUEUED, SBATCH


def see_output(record: RunRecord | None, job_id: str) -> str:
    """Where a job's output is, for people: the file's name in the run directory."""
    output = QUEUED.get(record.via if record is not None else SBATCH, QUEUED[SBATCH])
    return f"(see {output.format(job=job_id)})"


def not_in_queue(record: RunRecord, *, answered: bool) -> tuple[RunState, str]:
    """State and reason of a run of which no job is known: it is being submitted, or its submission was cut off.

    Parameters
    ----------
    answered
        Whether Slurm could be asked.
    """
    if record.busy:
        return RunState.PENDING, "not submitted yet"
    if not answered:
        return RunState.PENDING, "Slurm cannot be asked from here whether it was submitted"
    return RunState.LOST, f"it was to be submitted, and is not in the queue; cluster-ddp resume {record.id} submits it"


def failed_start(history: History, record: RunRecord | None, job_id: str, *, queued: bool) -> str | None:
    """Why the latest start of a job has failed before its attempt began; None when it has not.

    Parameters
    ----------
    queued
        Whether to look for one after which the job was queued again, or for one that was the last.
    """
    failed = _latest_failed(history, job_id)
    if failed is None or bool(failed.get("queued")) is not queued:
        return None
    host = str(failed.get("host") or "the batch host")
    word = "restart" if failed.get("restart_count") else "start"
    return f"{word} failed on {host}: {failed.get('reason')} {see_output(record, job_id)}"


def waits_for(history: History, record: RunRecord | None, job_id: str) -> str | None:
    """What keeps a job that runs from training; None once its ranks do, and when that is not known."""
    last = history.current_attempt
    if last is None or last.slurm_job_id not in (None, job_id) or history.of_attempt(last.number, REQUEUED):
        return f"starting: no attempt has begun yet, only launch.setup and Python {see_output(record, job_id)}"
    if last.nodes is None or history.of_attempt(last.number, STARTED, RESUMED):
        return None
    nodes = {event.get("node"): event for event in history.of_attempt(last.number, NODE_STARTED)}
    if (up := len(nodes)) >= last.nodes:
        tells_nothing = any(event.get("script") for event in nodes.values())
        return None if tells_nothing else "starting: all nodes have started, and their ranks do not train yet"
    return f"starting: {up} of {last.nodes} nodes have started so far {see_output(record, job_id)}"


def _latest_failed(history: History, job_id: str) -> Event | None:
    """The last event of a start of this job that failed, if no attempt has begun in it since."""
    failed = [event for event in history.events if event["event"] == START_FAILED]
    if not failed or str(failed[-1].get("slurm_job_id")) != job_id:
        return None
    last, restarts = history.last, as_whole(failed[-1].get("restart_count")) or 0
    begun = last is not None and last.slurm_job_id == job_id and last.restart_count >= restarts
    return None if begun else failed[-1]
