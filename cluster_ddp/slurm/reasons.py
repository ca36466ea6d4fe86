"""Why a job waits: Slurm's reason words in plain English, with the word itself for whoever looks it up."""

from __future__ import annotations

import re

_PLAIN = {
    "Priority": "jobs of a higher priority come first",
    "Resources": "waits for nodes to become free",
    "BeginTime": "not before its begin time, which Slurm also sets after a requeue",
    "Dependency": "waits for another job to end",
    "JobArrayTaskLimit": "waits for others of its array: only so many may run at once",
    "DependencyNeverSatisfied": "never starts: the job that it depends on has not ended as it should",
    "PartitionNodeLimit": "does not start: the partition allows fewer nodes",
    "PartitionTimeLimit": "does not start: the partition allows less time",
    "BadConstraints": "never starts: no nodes have what it asks for, apart from those that it excludes; cancel the run "
    "and resume it, as a new job",
    "QOSNotAllowed": "does not start: the partition or the account does not allow this QOS",
    "InvalidQOS": "does not start: its QOS is no longer there, or not for its account; ask whoever runs the cluster",
    "InvalidAccount": "does not start: its account is no longer there; ask whoever runs the cluster",
}
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max)(.+?)(?:Per(Job|User|Account|Node))?(?:Limit)?")
_OWNER = {"QOS": "the QOS", "Assoc": "the account"}
_WHAT = {
    "cpu": "CPUs", "node": "nodes", "nodes": "nodes", "gres": "GPUs or other resources", "jobs": "jobs",
    "mem": "memory", "memory": "memory", "walldurat": "time", "wallduration": "time", "wall": "time",
    "submitjob": "jobs in the queue", "submitjobs": "jobs in the queue",
}  # fmt: skip
_OF_WHOM = {"Job": "one job", "Node": "one node", "User": "one user", "Account": "one account"}


def in_words(reason: str) -> str | None:
    """What a reason of squeue's means, for people; None where Slurm has nothing to say.

    A reason that is not known here is given as Slurm has it.
    """
    if reason in ("", "None"):
        return None
    plain = _PLAIN.get(reason) or _limit(reason)
    return f"{plain} ({reason})" if plain else reason


def _limit(reason: str) -> str | None:
    match = _LIMIT.fullmatch(reason)
    if match is None:
        return None
    owner, kind, what, per = match.groups()
    lower = what.lower()
    limited = _WHAT.get(lower) or ("CPU time" if "minutes" in lower else what)
    if per in ("Job", "Node"):
        return f"does not start: {_OWNER[owner]} allows {_OF_WHOM[per]} less: {limited}"
    whose = _OF_WHOM[per] if per else "all its jobs together" if kind == "Grp" else "one user"
    return (
        f"{_OWNER[owner]} limits the {limited} of {whose}; it starts when others have ended, or never if it asks for "
        "more than that itself"
    )
