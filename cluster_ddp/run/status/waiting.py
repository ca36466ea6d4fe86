"""Why a job waits, in plain English, and what to do about that."""

from __future__ import annotations

import re

from cluster_ddp.slurm.states import SlurmJob
from cluster_ddp.words import moment

_PLAIN = {
    "Priority": "jobs of a higher priority come first",
    "Resources": "waits for nodes to become free",
    "None assigned yet": "Slurm has not looked at it yet",
    "WaitingForScheduling": "Slurm has not looked at it yet",
    "SchedDefer": "Slurm has not looked at it yet",
    "BeginTime": "not before its begin time, which Slurm also sets after a requeue",
    "Cleaning": "its previous start is still being cleaned up",
    "Prolog": "its nodes are being prepared",
    "Licenses": "waits for a license that other jobs use",
    "BurstBufferResources": "waits for room in the burst buffer",
    "BurstBufferStageIn": "its data is being copied to the burst buffer",
    "Dependency": "waits for another job to end",
    "JobArrayTaskLimit": "waits for other jobs of its array: only so many may run at once",
    "DependencyNeverSatisfied": "never starts: the job that it depends on did not end as the dependency requires",
    "PartitionDown": "its partition is not starting jobs now (sinfo -s); this job starts when it does",
    "PartitionInactive": "its partition is closed (sinfo -s); it starts when it is opened again",
    "PartitionNodeLimit": "does not start: it asks for more nodes than its partition allows or has up (sinfo)",
    "PartitionConfig": "does not start: this user may not use its partition (scontrol show partition), or its nodes "
    "have less than the job asks for (sinfo -o '%P %c %m %G'); cancel the run and resume it with other settings",
    "PartitionTimeLimit": "does not start: the partition allows less time; cancel the run and resume it with a shorter "
    "--set slurm.time=TIME (sinfo -o '%P %l' lists what each allows)",
    "NodeDown": "a node that it needs is down (sinfo -R says why); it starts when that node is back",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved (sinfo -R and scontrol show reservation say "
    "why and until when); it starts when they are back",
    "Reservation": "waits for its reservation to begin, or for nodes in it (scontrol show reservation)",
    "ReservationDeleted": "does not start: its reservation was deleted; cancel the run and resume it with "
    "--set slurm.reservation=null",
    "BadConstraints": "never starts: no node outside its exclude list meets the request; cancel the run and resume it "
    "as a new job",
    "QOSNotAllowed": "does not start: the partition or the account does not allow this QOS",
    "AccountNotAllowed": "does not start: the partition does not allow its account",
    "InvalidQOS": "does not start: its QOS was removed, or its account may not use it; ask whoever runs the cluster",
    "InvalidAccount": "its account is not known (yet): without accounting, Slurm says so for a moment; otherwise ask "
    "whoever runs the cluster",
    "QOSUsageThreshold": "does not start: the account has used more than its QOS allows; it starts when that usage "
    "has decayed (sshare)",
    "QOSJobLimit": "the QOS limits its jobs; it starts when others have ended",
    "QOSResourceLimit": "the QOS limits its resources; it starts when others have ended",
    "QOSTimeLimit": "the QOS limits its time; it starts when that usage has decayed, or never if it alone "
    "asks for more",
    "AssociationJobLimit": "the account limits its jobs; it starts when others have ended",
    "AssociationResourceLimit": "the account limits its resources; it starts when others have ended",
    "AssociationTimeLimit": "the account limits its time; it starts when that usage has decayed, or never if it "
    "alone asks for more",
}
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)(.+?)(?:Per(Job|User|Account|Node))?(?:Limit)?")
_LEAST = re.compile(r"QOSMin(.+?)(?:NotSatisfied)?")
_OF_ACCOUNT = re.compile(r"Max(.+?)(?:RunMins)?PerAccount")  # by a QOS, which this name does not say
_OWNER = {"QOS": "the QOS", "Assoc": "the account"}
_WHAT = {
    "cpu": "CPUs", "node": "nodes", "nodes": "nodes", "gres": "GPUs or other resources", "jobs": "jobs",
    "mem": "memory", "memory": "memory", "walldurat": "time", "wallduration": "time", "wall": "time",
    "submitjob": "jobs in the queue", "submitjobs": "jobs in the queue",
    "license": "licenses", "licenses": "licenses", "bb": "burst buffer",
}  # fmt: skip
_OF_WHOM = {"Job": "one job", "Node": "one node", "User": "one user", "Account": "one account"}


def in_words(reason: str) -> str | None:
    """Explain squeue's reason to people; None if Slurm gives none.

    An unknown reason is returned as Slurm writes it.
    """
    if reason in ("", "None"):
        return None
    word, _, _ = reason.partition(",")  # ReqNodeNotAvail, UnavailableNodes:n7
    plain = _PLAIN.get(word) or _limit(reason)
    return f"{plain} ({reason})" if plain else reason


def why_it_waits(job: SlurmJob) -> str | None:
    """Say what a job in the queue is waiting for, and when Slurm expects it to start; None if Slurm does not say."""
    said = in_words(job.reason)
    if job.state == "CONFIGURING" and said is None:
        return "Slurm is powering up or rebooting its nodes (CONFIGURING)"
    if job.starts is not None:
        return f"{said or 'in the queue'}; Slurm expects it to start at {moment(job.starts)}"
    return said


def how_to_continue(job: SlurmJob) -> str:
    """Say who has made a job's processes stand still, and what makes them continue."""
    if job.state == "STOPPED":  # not by Slurm, which therefore does not resume it either
        # The first reaches the job's steps, the second its script: which of them was stopped, Slurm does not show.
        return (
            "stopped by a signal (scancel --signal=STOP); it continues where it is after: "
            f"scancel --signal=CONT {job.job_id}; scancel --signal=CONT --full {job.job_id}"
        )
    return "suspended by Slurm; it continues where it is when Slurm resumes it"


def how_to_release(job: SlurmJob) -> str:
    """Say why Slurm holds a job, who can release it, and how."""
    why = job.state if job.reason in ("", "None") else job.reason
    if job.reason == "JobHeldAdmin":
        return f"an administrator holds Slurm job {job.job_id} ({why}); ask them for: scontrol release {job.job_id}"
    return f"Slurm holds job {job.job_id} ({why}); release it with: scontrol release {job.job_id}"


def _limit(reason: str) -> str | None:
    if least := _LEAST.fullmatch(reason):
        return f"does not start: the QOS requires a job to ask for more {_what(least[1])}"
    if of_account := _OF_ACCOUNT.fullmatch(reason):
        reason = f"QOSMax{of_account[1]}PerAccount"
    match = _LIMIT.fullmatch(reason)
    if match is None:
        return None
    owner, kind, what, per = match.groups()
    limited = _what(what)
    if per in ("Job", "Node"):
        return f"does not start: it asks for more {limited} than {_OWNER[owner]} allows for {_OF_WHOM[per]}"
    whose = _OF_WHOM[per] if per else "all its jobs together" if kind == "Grp" else "one user"
    return (
        f"{_OWNER[owner]} limits the {limited} of {whose}; it starts when others have ended, or never if it "
        "alone asks for more than that"
    )


def _what(limited: str) -> str:
    lower = limited.lower()
    return _WHAT.get(lower) or ("CPU time" if "minutes" in lower else limited)
