"""Calls of Slurm's own commands: sbatch, squeue, scontrol, scancel.

Only options that Slurm 22.05 knows are used, no sacct (many clusters have no accounting), and many jobs are asked
about with one call.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from cluster_ddp.slurm.states import SlurmJob
from cluster_ddp.spec.errors import ClusterDDPError

COMMENT = "cluster_ddp "
"""Begins the comment of a job of ours; the run's id follows. It tells our job from a stranger that got its id later."""

_KEPT_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""How to reach Slurm: the variables that a child job needs, too (without SLURM_CONF nothing works on some clusters)."""

_BUSY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Resource temporarily unavailable",
    "Slurm temporarily unable",
)
_PAUSES = (1.0, 3.0)
"""Seconds between the tries while the controller is busy or restarting."""

_MOST_WORDS = 4000
"""Characters of an answer that are shown; the end says most."""

_COMMAND_TIMEOUT = 100.0
"""Seconds; above MessageTimeout of a slow cluster, so that Slurm's own words come first."""


class SlurmError(ClusterDDPError):
    """Slurm refused, cannot be reached, or is not here."""

    exit_status = 3


class SubmissionUnclear(SlurmError):
    """sbatch was called, and whether its job is in the queue is not known."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}\nThe job may be in the queue all the same: look with squeue --me before you submit again."
        )


def submit_script(script: Path, *arguments: str, options: Sequence[str] = ()) -> str:
    """Hand a batch script to sbatch and return the job id.

    Parameters
    ----------
    script
        The batch script.
    arguments
        Its arguments.
    options
        Options of sbatch itself; they win over the script's ``#SBATCH`` lines.

    Raises
    ------
    SubmissionUnclear
        sbatch gives no answer in time, or one that is no job id.
    SlurmError
        sbatch is missing, or refuses.
    """
    require("sbatch")
    answer = _call(
        ["sbatch", "--parsable", *options, str(script), *arguments], environment=child_environment(os.environ)
    )
    return parse_job_id(answer)


def parse_job_id(answer: str) -> str:
    """The job id in what ``sbatch --parsable`` printed: ``123`` or ``123;cluster``, perhaps below a site's greeting."""
    lines = answer.strip().splitlines()
    job_id = lines[-1].split(";")[0].strip() if lines else ""
    if not job_id.isdigit():
        raise SubmissionUnclear(f"sbatch answered without a job id: {answer.strip()[-_MOST_WORDS:]!r}")
    return job_id


def query_jobs(job_ids: Iterable[str], *, seconds: float = _COMMAND_TIMEOUT) -> dict[str, SlurmJob]:
    """Ask squeue about many jobs with one call.

    Parameters
    ----------
    job_ids
        Ids, ``123`` or ``123_4``. Those that Slurm no longer knows are missing from the answer.
    seconds
        How long to wait for an answer.

    Raises
    ------
    SlurmError
        squeue is missing or the controller does not answer.
    """
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    require("squeue")
    command = [
        "squeue",
        "--noheader",
        "--states=all",
        "--array",
        f"--jobs={','.join(wanted)}",
        "--format=%i|%A|%T|%N|%r|%k",
    ]
    try:
        return parse_queue(_call(command, seconds=seconds))
    except SlurmError as error:
        # Asked about one job only, squeue fails where it is silent among several.
        if "Invalid job id" in str(error):
            return {}
        raise


def parse_queue(answer: str) -> dict[str, SlurmJob]:
    """Read squeue's lines ``id|plain id|state|nodes|reason|comment``; each job is found by both forms of its id."""
    jobs: dict[str, SlurmJob] = {}
    for line in answer.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) != 6:
            continue
        shown, plain, state, nodes, reason, comment = fields
        run_id = comment.removeprefix(COMMENT) if comment.startswith(COMMENT) else None
        jobs[shown] = jobs[plain] = SlurmJob(shown, state, reason, nodes, run_id)
    return jobs


def cancel_job(job_id: str) -> None:
    """``scancel``; a job that is no longer there is as good as cancelled.

    Raises
    ------
    SlurmError
        scancel is missing, refuses, or cannot reach the controller.
    """
    require("scancel")
    try:
        _call(["scancel", job_id])
    except SlurmError as error:
        if "Invalid job id" not in str(error) and "already completing or completed" not in str(error):
            raise


def termination_reason(job_id: str, restart_count: int) -> str:
    """Why Slurm ends a job, asked in the same words as in the batch script.

    Parameters
    ----------
    job_id, restart_count
        The job, and which of its starts this is (SLURM_RESTART_COUNT).

    Returns
    -------
    str
        ``time-limit``, ``preemption``, ``requeued`` (Slurm has queued it again itself: a node failure, a preemption),
        ``cancel``, or ``terminated`` where Slurm does not end it or does not answer.
    """
    try:
        require("scontrol")
        job = f" {_call(['scontrol', 'show', 'job', '-o', job_id]).strip()} "
    except SlurmError:
        return "terminated"
    if " Reason=TimeLimit " in job:
        return "time-limit"
    if re.search(r" PreemptTime=\d", job):
        return "preemption"
    if f" Restarts={restart_count} " not in job or " PreemptTime=None " not in job:
        return "requeued"
    return "terminated" if " JobState=RUNNING " in job else "cancel"


def has_enough_others(job_id: str, hosts: Iterable[str], *, partition: str, nodes: int) -> bool:
    """Whether a partition has so many nodes besides some hosts and those that the job is kept from already.

    The batch script counts them in the same way.

    Raises
    ------
    SlurmError
        Slurm does not answer.
    """
    states = "--states=idle,mixed,allocated,completing"
    up = _call(["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N", states]).split()
    known = _excluded(job_id)
    gone = _call(["scontrol", "show", "hostnames", known]).split() if known else []
    return len(set(up) - set(hosts) - set(gone)) >= nodes


def exclude_hosts(job_id: str, hosts: Sequence[str]) -> None:
    """Keep a queued job from some hosts, besides those that it is kept from, as the batch script does.

    Raises
    ------
    SlurmError
        Slurm does not answer, or refuses.
    """
    excluded = ",".join(filter(None, [_excluded(job_id), *hosts]))
    _call(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={excluded}"])


def _excluded(job_id: str) -> str:
    """The node list that a job is kept from; empty where there is none."""
    known = re.search(r" ExcNodeList=([^ (]+)", _call(["scontrol", "show", "job", "-o", job_id]))
    return known[1] if known else ""


def seconds_left(job_id: str) -> float:
    """Seconds until SIGKILL, at the least, when Slurm ends a job, told as in the batch script.

    It is KillWait, or the grace of a preemption where that is longer: whoever gives it, partition or QOS, Slurm sets
    EndTime to its end and lets the job run.
    """
    left = 0.0
    with contextlib.suppress(SlurmError, ValueError, OverflowError):
        job = f" {_call(['scontrol', 'show', 'job', '-o', job_id])}"
        found = re.search(r" JobState=RUNNING .* EndTime=(\S+) .* PreemptTime=\d", job)
        if found:
            left = datetime.fromisoformat(found[1]).timestamp() - time.time()
    return max(left, kill_wait())


def kill_wait() -> float:
    """Seconds between SIGTERM and SIGKILL when Slurm ends a job; Slurm's own default where it does not tell."""
    try:
        found = re.search(r"^KillWait\s*=\s*(\d+)", _call(["scontrol", "show", "config"]), re.MULTILINE)
    except SlurmError:
        found = None
    return float(found[1]) if found else 30.0


def require(command: str) -> None:
    """Raise a SlurmError unless `command` is on PATH."""
    if shutil.which(command) is None:
        raise SlurmError(
            f"{command} is not on PATH: there is no Slurm client here.\n"
            "Run this on the cluster's login node (after `module load slurm`?), or train here: cluster-ddp local JOB"
        )


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to submit with: inside a job, without what describes that job.

    Inherited SLURM_* variables would change the child (its nodes, its memory, its CPU binding).
    """
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or not name.startswith(("SLURM_", "SRUN_", "PMI_", "PMIX_"))
    }


def _call(
    command: list[str], *, environment: Mapping[str, str] | None = None, seconds: float = _COMMAND_TIMEOUT
) -> str:
    """Standard output of a command of Slurm's; tried again while the controller is too busy to answer.

    A submission is tried only once: after a time-out sbatch's job may be in the queue all the same.
    """
    pauses = () if command[0] == "sbatch" else _PAUSES
    for pause in pauses:
        try:
            return _call_once(command, environment, seconds)
        except SlurmError as error:
            if not any(word in str(error) for word in _BUSY):
                raise
        time.sleep(pause)
    return _call_once(command, environment, seconds)


def _call_once(command: list[str], environment: Mapping[str, str] | None, seconds: float) -> str:
    import subprocess

    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        kind = SubmissionUnclear if command[0] == "sbatch" else SlurmError
        raise kind(
            f"{command[0]} gave no answer in {seconds:.0f} s; is Slurm's controller up? (scontrol ping)"
        ) from None
    except OSError as error:
        raise SlurmError(f"{command[0]} could not be started: {error}.") from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message")[-_MOST_WORDS:]
        raise SlurmError(f"{command[0]} failed (status {done.returncode}): {words}\nThe command: {' '.join(command)}")
    return done.stdout
