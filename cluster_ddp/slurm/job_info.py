"""Parses what ``scontrol show job -o`` says about a job's end, and judges it. Slurm is not called here."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cluster_ddp.slurm.shown import shown_fields
from cluster_ddp.slurm.states import LETS_RUN

TIME_LIMIT = "time-limit"
PREEMPTION = "preemption"
REQUEUED = "requeued"
NODE_FAILURE = "node-failure"
NODE_DOWN = "node-down"
CANCEL = "cancel"
TERMINATED = "terminated"

ALREADY_REQUEUED = frozenset({REQUEUED, NODE_FAILURE})
"""Those for which Slurm has requeued the job itself, or been told to."""


@dataclass(frozen=True)
class JobInfo:
    """The fields that show how a job ends, as Slurm writes them; empty if not shown."""

    state: str
    reason: str
    requeued_by_slurm: bool  # whether Slurm may requeue it by itself
    restarts: str  # how often Slurm has requeued the job so far
    start_time: str  # of this start, in local time
    end_time: str  # when Slurm will end it, in local time; ``Unknown`` without a time limit
    # When it was preempted; ``None`` if it was not. A requeued job has no such field
    preempt_time: str
    excluded: str  # the node list that the job excludes
    required: str  # the node list that it requests by name
    nodes: str  # the node list that it has now
    features: str  # the expression of --constraint
    gres: str  # what it requests on each node, such as ``gres/gpu:a100:4``
    qos: str
    reservation: str  # the reservations that it runs in, with commas
    cpus: int  # what it requests on each node; 0 if not shown
    memory: float  # the same in MiB


def parse_job(answer: str) -> JobInfo | None:
    """Parse the line of ``scontrol show job -o``; None for an empty or incomplete answer."""
    fields = shown_fields(answer)
    if not {"JobState", "Restarts"} <= fields.keys():
        return None
    lists = {name: fields.get(name, "") for name in ("ExcNodeList", "ReqNodeList", "NodeList")}
    features = fields.get("Features", "")  # may itself begin with a bracket, as in (a|b)&c
    excluded, required, nodes = ("" if shown.startswith("(") else shown for shown in lists.values())  # (null)
    return JobInfo(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        requeued_by_slurm=fields.get("Requeue", "0") != "0",
        restarts=fields.get("Restarts", ""),
        start_time=fields.get("StartTime", ""),
        end_time=fields.get("EndTime", ""),
        preempt_time=fields.get("PreemptTime", ""),
        excluded=excluded,
        required=required,
        nodes=nodes,
        features="" if features.startswith("(null") else features,
        gres=fields.get("TresPerNode", ""),
        qos=fields.get("QOS", ""),
        reservation=fields.get("Reservation", ""),
        cpus=(cpus := int(_number(fields.get("MinCPUsNode", "")))),
        memory=_mebibytes(fields.get("MinMemoryNode", "")) or cpus * _mebibytes(fields.get("MinMemoryCPU", "")),
    )


def _number(shown: str) -> float:
    found = re.match(r"\d+(\.\d+)?", shown)
    return float(found[0]) if found else 0.0


def _mebibytes(shown: str) -> float:
    """Convert an amount of memory as Slurm shows it, such as 62.50G; 0 if it shows none."""
    return _number(shown) * 1024.0 ** max(0, "MGTP".find(shown[-1:]))


def is_ending(job: JobInfo | None) -> bool:
    """Whether Slurm is certainly about to end a job, for a start that may have missed a signal."""
    if job is None:
        return False
    preempted = job.preempt_time[:1].isdigit() and job.preempt_time >= job.start_time  # not an earlier start
    return preempted or job.reason == "TimeLimit" or job.state == "COMPLETING"


def why_it_ends(job: JobInfo, restart_count: int, grace_end: str = "") -> str:
    """Return why Slurm ends a job.

    After a time limit or a preemption that Slurm does not requeue itself, only the job can requeue itself; after a node
    failure, a requeue by hand and most preemptions Slurm has already done so, if it may. A scancel shows none of this.

    Parameters
    ----------
    grace_end
        The EndTime that was shown during the grace of a preemption; empty if none was seen. A job that ends before that
        was cancelled: nothing else that Slurm shows distinguishes this from the preemption itself.

    Returns
    -------
    str
        ``time-limit``, ``preemption``, ``requeued`` (Slurm has requeued it), ``node-down`` (a node has failed, or the
        partition was removed, and Slurm may not requeue it), ``cancel``, or ``terminated`` if Slurm does not end it
        (somebody sent a signal).
    """
    if job.restarts != str(restart_count):
        return REQUEUED  # the other fields may describe the newer start: its time limit, its preemption
    if job.reason == "TimeLimit":
        return TIME_LIMIT
    if job.preempt_time[:1].isdigit():
        cancelled = job.state == "CANCELLED" or (job.state == "COMPLETING" and job.end_time < grace_end)
        return CANCEL if cancelled else PREEMPTION
    if job.preempt_time != "None":
        return REQUEUED
    if job.state in LETS_RUN:
        return TERMINATED
    return NODE_DOWN if job.reason in ("NodeDown", "PartitionDown") else CANCEL


def grace_end(job: JobInfo) -> str:
    """Return EndTime during the grace of a preemption; empty otherwise, or if Slurm shows none."""
    in_grace = job.state in LETS_RUN and job.preempt_time[:1].isdigit()
    return job.end_time if in_grace and job.end_time[:1].isdigit() else ""


def unseen_grace_end(job: JobInfo, grace: Callable[[], float]) -> str:
    """Return when a preemption's grace would have ended, in Slurm's form, for a job first queried at its end.

    Empty if nothing suggests a cancel: newer Slurm versions show the end of the grace as the time of the preemption.
    Then `grace` is not called, nor for a job without grace, since SIGKILL is near.
    """
    preempted, ended = unix_time(job.preempt_time), unix_time(job.end_time)
    if job.state in LETS_RUN or preempted is None or ended is None or ended - preempted < 2:
        return ""
    return datetime.fromtimestamp(preempted + grace() - 1).isoformat()


def seconds_until_kill(job: JobInfo, kill_wait: float, waited: float) -> float:
    """Return a lower bound of the seconds until SIGKILL when Slurm ends a job.

    It is KillWait, or the rest of a preemption's grace if that is longer: whether the partition or the QOS gives the
    grace, Slurm moves EndTime to its end and lets the job run. SIGKILL comes KillWait after it.

    Parameters
    ----------
    kill_wait
        What is left of KillWait.
    waited
        Seconds since the signal arrived. The grace is no longer than Slurm's own clock tells, from the preemption on,
        as this host's may be behind.
    """
    end, preempted = unix_time(grace_end(job)), unix_time(job.preempt_time)
    if end is None or preempted is None:
        return kill_wait
    return max(kill_wait, min(end - time.time(), end - preempted - waited))


def unix_time(shown: str) -> float | None:
    """Convert a time as Slurm shows it to Unix seconds; None for ``Unknown`` and the like."""
    try:
        return datetime.fromisoformat(shown).timestamp()
    except (ValueError, OverflowError):
        return None
