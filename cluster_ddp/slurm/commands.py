"""Calls Slurm's commands: sbatch, squeue, scancel, sacct; scontrol and sinfo are in control.py.

Only options that Slurm 22.05 knows are used, nothing depends on sacct (many clusters have no accounting), and many jobs
are queried with one call.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.printing import say
from cluster_ddp.slurm.environment import environment_for, without_filters
from cluster_ddp.slurm.states import ACTIVE, WAITING, SlurmJob, is_job_id

QUEUE_FORMAT = "%i|%A|%T|%N|%r@%S|%k|%j|%U"
"""What squeue is asked for each job: id, plain id, state, nodes, reason, comment, name, user."""

ENDED_FIELDS = "--format=JobID,JobIDRaw,State,NodeList,Reason,Comment,JobName,UID"
"""What sacct is asked, in the order of `QUEUE_FORMAT`."""

_BUSY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Resource temporarily unavailable",
    "Slurm temporarily unable",
)
_UNREACHABLE = (
    *_BUSY,
    "onnection refused",
    "onnection failure",
    "onnection timed out",
    "onnection reset",
    "o route to host",
    "eceive failure",
    "end failure",
    "ero Bytes were transmitted or received",
    "standby mode",
    "not in a state to",
    "uthentication",  # munge or sackd is unavailable on this host
    "unge",
    "configuration source",  # slurm.conf cannot be read, or fetched from the controller
)
"""In an answer: the controller is away, starting, or handing over to another, or nobody here can speak to it.

Anything else is a refusal.
"""

_UNHEARD = ("Socket timed out", "eceive failure", "hutdown failure", "onnection reset", "ero Bytes were transmitted")
"""In an answer of sbatch: the controller may have taken the job, and only its answer is missing."""

_JOB_ID_LINE = re.compile(r"([0-9]+)(;\S+)?")

PAUSES = (1.0, 3.0)
"""Seconds between the tries while the controller is busy or restarting."""

_MAX_ANSWER = 4000
"""Characters of an answer that are shown; the end says most."""

_COMMAND_TIMEOUT = 100.0
"""Seconds; above MessageTimeout of a slow cluster, so that Slurm's own error comes first."""


class SlurmError(ClusterDDPError):
    """Slurm refused, cannot be reached, or is not installed here."""

    exit_status = exit_statuses.SLURM_FAILED


class SlurmRefused(SlurmError):
    """Slurm's controller was reached, and refused."""


class SubmissionUnclear(SlurmError):
    """sbatch was called, but it is not known whether its job is in the queue."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}\nThe job may have been queued anyway: check squeue --me before you submit again.")


def submit_script(script: Path, *arguments: str, options: Sequence[str] = ()) -> str:
    """Submit a batch script with sbatch and return the job id; remarks by sbatch or the site are passed on.

    It is tried only once: after a time-out the job may be in the queue nevertheless.

    Parameters
    ----------
    options
        Options of sbatch itself; they override the script's ``#SBATCH`` lines.

    Raises
    ------
    SubmissionUnclear
        sbatch does not answer in time or not with a job id, got no answer from the controller, fails after printing the
        id, or is killed.
    SlurmError
        sbatch is missing, or refuses.
    """
    require("sbatch")
    text = ""
    with contextlib.suppress(OSError, ValueError):  # sbatch reports what is wrong with it
        text = script.read_text()
    command = ["sbatch", "--parsable", *options, str(script), *arguments]
    return parse_job_id(call_once(command, environment=environment_for(text), remark=say))


def try_script(text: str, *, seconds: float) -> None:
    """Have sbatch check a batch script without submitting it.

    Raises
    ------
    SlurmRefused
        With Slurm's message.
    SlurmError
        sbatch does not answer in time, or cannot reach the controller.
    """
    call_once(["sbatch", "--test-only"], environment=environment_for(text), seconds=seconds, text=text)


def parse_job_id(answer: str) -> str:
    """Find the job id in the output of ``sbatch --parsable``: ``123`` or ``123;cluster`` on a separate line.

    A site's wrapper may print text before and after it.
    """
    job_id = _job_id_in(answer)
    if job_id is None:
        raise SubmissionUnclear(f"sbatch answered without a job id: {answer.strip()[-_MAX_ANSWER:]!r}")
    return job_id


def may_be_queued(words: str) -> bool:
    """Whether the job may be in the queue although sbatch has failed with this message."""
    return any(sign in words for sign in _UNHEARD)


def _job_id_in(answer: str) -> str | None:
    found = [match[1] for line in answer.splitlines() if (match := _JOB_ID_LINE.fullmatch(line.strip()))]
    return found[-1] if found else None


def query_jobs(job_ids: Iterable[str], *, seconds: float = _COMMAND_TIMEOUT) -> dict[str, SlurmJob]:
    """Query squeue about many jobs with one call.

    Parameters
    ----------
    job_ids
        Ids, ``123`` or ``123_4``; anything else is left out. Those that Slurm no longer knows are missing from the
        answer.

    Raises
    ------
    SlurmError
        squeue is missing or the controller does not answer.
    """
    wanted = _arrays_as_one(filter(is_job_id, set(job_ids)))
    if not wanted:
        return {}
    require("squeue")
    command = [
        "squeue",
        "--noheader",
        "--states=all",
        "--array",
        f"--jobs={','.join(wanted)}",
        f"--format={QUEUE_FORMAT}",
    ]
    try:
        return parse_queue(call(command, seconds=seconds))
    except SlurmError as error:
        # For a single unknown job squeue fails; among several it is silent about it.
        if "Invalid job id" in str(error):
            return {}
        raise


def query_own_jobs(*, seconds: float = _COMMAND_TIMEOUT) -> dict[str, SlurmJob]:
    """Return all jobs of this user that Slurm knows, with one call of squeue; raises as `query_jobs` does."""
    require("squeue")
    command = ["squeue", "--noheader", "--states=all", "--all", "--array", "--me", f"--format={QUEUE_FORMAT}"]
    return parse_queue(call(command, seconds=seconds))


def _arrays_as_one(job_ids: Iterable[str]) -> list[str]:
    """Return the ids, sorted, with an array in place of several of its tasks: squeue then lists all of them."""
    tasks: dict[str, list[str]] = {}
    for job_id in job_ids:
        tasks.setdefault(job_id.partition("_")[0], []).append(job_id)
    return sorted(array if len(named) > 1 else named[0] for array, named in tasks.items())


def query_ended_jobs(job_ids: Iterable[str], *, seconds: float) -> dict[str, SlurmJob]:
    """Query the accounting database, with one call of sacct, about how jobs ended that squeue no longer knows.

    Empty without accounting. A job that has not ended according to it is omitted: squeue is more reliable about live
    jobs.
    """
    wanted = sorted(filter(is_job_id, set(job_ids)))
    command = ["sacct", "--noheader", "--allocations", "--parsable2", ENDED_FIELDS, f"--jobs={','.join(wanted)}"]
    try:
        jobs = parse_queue(call_once(command, seconds=seconds)) if wanted else {}
    except SlurmError:
        return {}
    ended = {job_id: job._replace(state=job.state.split(" ")[0]) for job_id, job in jobs.items()}  # CANCELLED by 1000
    return {job_id: job for job_id, job in ended.items() if job.state not in ACTIVE | WAITING}


def parse_queue(answer: str) -> dict[str, SlurmJob]:
    """Parse squeue's lines ``id|plain id|state|nodes|reason@start|comment|name|user``, by both ids of each job."""
    jobs: dict[str, SlurmJob] = {}
    for line in answer.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) != 6:
            continue
        shown, plain, state, nodes, reason, rest = fields
        comment, name, user = [*rest.rsplit("|", 2), "", ""][:3]
        reason, starts = _split_start(reason)
        owner = int(user) if user.isdecimal() else None
        jobs[shown] = jobs[plain] = SlurmJob(shown, state, reason, nodes, comment, starts, name, owner)
    return jobs


def _split_start(reason: str) -> tuple[str, float | None]:
    """Split a reason from the time after it, in Unix seconds; sacct gives none, nor does squeue if it is unknown."""
    word, at, start = reason.rpartition("@")
    if not at:
        return reason, None
    with contextlib.suppress(ValueError, OverflowError):
        return word, time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
    return word, None


def cancel_job(*job_ids: str, only_waiting: bool = False) -> None:
    """Call ``scancel``; a job that no longer exists counts as cancelled.

    Parameters
    ----------
    only_waiting
        Spare jobs that have started meanwhile.
    """
    assert all(map(is_job_id, job_ids)), job_ids
    require("scancel")
    try:
        call(["scancel", *(["--state=PENDING"] if only_waiting else []), *job_ids])
    except SlurmError as error:
        if "Invalid job id" not in str(error) and "already completing or completed" not in str(error):
            raise


def require(command: str) -> None:
    """Raise a SlurmError unless `command` is on PATH."""
    if shutil.which(command) is None:
        raise SlurmError(
            f"{command} is not on PATH: there is no Slurm client here.\n"
            "Run this on the cluster's login node (after `module load slurm`?), or train here: cluster-ddp local JOB"
        )


def call(command: list[str], *, seconds: float = _COMMAND_TIMEOUT) -> str:
    """Return the standard output of a Slurm command; retried while the controller is too busy to answer.

    Parameters
    ----------
    seconds
        For all tries together: with the controller down each may take a quarter of a minute.
    """
    deadline = time.monotonic() + seconds
    for pause in PAUSES:
        left = deadline - time.monotonic()
        try:
            return call_once(command, seconds=left)
        except SlurmError as error:
            if not any(word in str(error) for word in _BUSY) or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
    return call_once(command, seconds=max(1.0, deadline - time.monotonic()))


def call_once(
    command: list[str],
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float = _COMMAND_TIMEOUT,
    text: str = "",
    remark: Callable[[str], None] | None = None,
) -> str:
    """Return the standard output of a Slurm command, called once with `text` as its standard input.

    Parameters
    ----------
    remark
        Called with what it prints on standard error even if it succeeds: a warning, or a message of the site.

    Raises
    ------
    SlurmRefused
        The controller refuses; the error contains its message.
    SlurmError
        The command is missing, does not answer in time, or cannot reach the controller.
    """
    import subprocess

    submits = command[0] == "sbatch" and "--test-only" not in command
    try:
        done = subprocess.run(
            command,
            env=without_filters(os.environ if environment is None else environment),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        unclear = SubmissionUnclear if submits else SlurmError
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        why = f": {said[-1]}" if said else "; is Slurm's controller up? (scontrol ping)"
        raise unclear(f"{command[0]} gave no answer in {seconds:.0f} s{why}") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} could not be started: {error}.") from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message")[-_MAX_ANSWER:]
        kind: type[SlurmError] = SlurmError if any(sign in words for sign in _UNREACHABLE) else SlurmRefused
        if submits and (done.returncode < 0 or may_be_queued(words) or _job_id_in(done.stdout)):
            kind = SubmissionUnclear
        hint = f"The command: {' '.join(command)}"
        if kind is SlurmError:
            hint = f"{'Nothing was queued. ' if submits else ''}Try again once Slurm answers here (scontrol ping)."
        raise kind(f"{command[0]} failed (status {done.returncode}): {words}\n{hint}")
    if remark is not None and (words := done.stderr.strip()):
        remark(words[-_MAX_ANSWER:])
    return done.stdout
