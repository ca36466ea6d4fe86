"""What ``scontrol show job -o`` tells a job about its own end. Answers are parsed and judged; Slurm is not called."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from cluster_ddp.slurm.states import LETS_RUN

TIME_LIMIT = "time-limit"
PREEMPTION = "preemption"
REQUEUED = "requeued"
NODE_FAILURE = "node-failure"
NODE_DOWN = "node-down"
CANCEL = "cancel"
TERMINATED = "terminated"


@dataclass(frozen=True)
class ShownJob:
    """The fields of a job that its end is judged by, as Slurm writes them; empty where it shows none."""

    state: str
    reason: str
    requeued_by_slurm: bool  # whether Slurm may queue it again of its own accord
    restarts: str  # how often Slurm has queued the job again so far
    start_time: str  # of this start, in local time
    end_time: str  # when Slurm will end it, in local time; ``Unknown`` without a time limit
    # When it was preempted; ``None`` where it was not. A job that is queued again shows no such field
    preempt_time: str
    excluded: str  # the node list that the job excludes
    required: str  # the node list that it asks for by name
    nodes: str  # the node list that it has now
    features: str  # the expression of --constraint
    gres: str  # what it asks for on each node, such as ``gres/gpu:a100:4``
    qos: str


def parse_job(answer: str) -> ShownJob | None:
    """Read the line of ``scontrol show job -o``; None for an answer that is empty or only a part of one."""
    fields = dict(reversed(re.findall(r"(?<!\S)(\w+)=(\S*)", answer)))  # the first counts: a comment may hold anything
    if not {"JobState", "Restarts"} <= fields.keys():
        return None
    lists = {name: fields.get(name, "") for name in ("ExcNodeList", "ReqNodeList", "NodeList")}
    features = fields.get("Features", "")  # may begin with a bracket of its own, as in (a|b)&c
    excluded, required, nodes = ("" if shown.startswith("(") else shown for shown in lists.values())  # (null)
    return ShownJob(
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
    )


def is_ending(job: ShownJob | None) -> bool:
    """Whether Slurm is surely about to end a job: what a start that may have missed a signal asks."""
    if job is None:
        return False
    preempted = job.preempt_time[:1].isdigit() and job.preempt_time >= job.start_time  # not an earlier start
    return preempted or job.reason == "TimeLimit" or job.state == "COMPLETING"


def why_it_ends(job: ShownJob, restart_count: int, grace_end: str = "") -> str:
    """Why Slurm ends a job.

    After a time limit and a preemption nobody queues the job again but itself; after a node failure, a requeue by hand
    and most preemptions Slurm has done so already, where it may. A scancel shows none of this.

    Parameters
    ----------
    grace_end
        The EndTime that was shown while the grace of a preemption lasted; empty when none was seen. A job that ends
        before it was cancelled: nothing else that Slurm shows tells this from the preemption itself.

    Returns
    -------
    str
        ``time-limit``, ``preemption``, ``requeued`` (Slurm has queued it again), ``node-down`` (a node has failed, and
        Slurm may not queue it again), ``cancel``, or ``terminated`` where Slurm does not end it (somebody sent a
        signal).
    """
    if job.restarts != str(restart_count):
        return REQUEUED  # what else is shown may be of the newer start: its time limit, its preemption
    if job.reason == "TimeLimit":
        return TIME_LIMIT
    if job.preempt_time[:1].isdigit():
        cancelled = job.state == "CANCELLED" or (job.state == "COMPLETING" and job.end_time < grace_end)
        return CANCEL if cancelled else PREEMPTION
    if job.preempt_time != "None":
        return REQUEUED
    if job.state in LETS_RUN:
        return TERMINATED
    return NODE_DOWN if job.reason == "NodeDown" else CANCEL


def grace_end(job: ShownJob) -> str:
    """EndTime as long as the grace of a preemption lasts; empty otherwise, and where Slurm shows none."""
    in_grace = job.state in LETS_RUN and job.preempt_time[:1].isdigit()
    return job.end_time if in_grace and job.end_time[:1].isdigit() else ""


def unseen_grace_end(job: ShownJob, grace: Callable[[], float]) -> str:
    """When the grace of a preemption would have ended, in Slurm's form, of a job that is first asked about at its end.

    Empty where nothing speaks for a cancel: newer Slurms call the end of the grace the time of the preemption. Then it
    is not asked how many seconds of grace there are, as of a job that was given none: SIGKILL is near.
    """
    preempted, ended = unix_time(job.preempt_time), unix_time(job.end_time)
    if job.state in LETS_RUN or preempted is None or ended is None or ended - preempted < 2:
        return ""
    return datetime.fromtimestamp(preempted + grace() - 1).isoformat()


def seconds_until_kill(job: ShownJob, kill_wait: float) -> float:
    """Seconds until SIGKILL, at the least, when Slurm ends a job.

    It is KillWait, or the rest of a preemption's grace where that is longer: whoever gives the grace, partition or QOS,
    Slurm moves EndTime to its end and lets the job run. SIGKILL comes KillWait after it.
    """
    end = unix_time(grace_end(job))
    return kill_wait if end is None else max(kill_wait, end - time.time())


def unix_time(shown: str) -> float | None:
    """Unix seconds of a moment as Slurm shows it; None for ``Unknown`` and the like."""
    try:
        return datetime.fromisoformat(shown).timestamp()
    except (ValueError, OverflowError):
        return None
