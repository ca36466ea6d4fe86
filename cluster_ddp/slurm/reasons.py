"""What Slurm says, in plain English: why a job waits, and what to do about a refusal."""

from __future__ import annotations

import re

_PLAIN = {
    "Priority": "jobs of a higher priority come first",
    "Resources": "waits for nodes to become free",
    "BeginTime": "not before its begin time, which Slurm also sets after a requeue",
    "Dependency": "waits for another job to end",
    "JobArrayTaskLimit": "waits for other jobs of its array: only so many may run at once",
    "DependencyNeverSatisfied": "never starts: the job that it depends on has not ended as it should",
    "PartitionNodeLimit": "does not start: the partition allows fewer nodes",
    "PartitionTimeLimit": "does not start: the partition allows less time",
    "BadConstraints": "never starts: no node that it does not exclude has what it asks for; cancel the run and resume "
    "it, as a new job",
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
    """Explain squeue's reason to people; None if Slurm gives none.

    An unknown reason is returned as Slurm writes it.
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


_ADVICE = {  # the first match counts: "violates accounting/QOS policy" mentions time limits, too
    "SubmitJob": (
        "a limit on jobs in the queue, where each element of a sweep and each job of a chain counts (squeue --me): "
        "wait until some have ended, or ask for fewer"
    ),
    "violates accounting/QOS policy": (
        "a limit of your account or QOS: sacctmgr show assoc user=$USER, sacctmgr show qos"
    ),
    "Invalid account or account/partition": (
        "slurm.account: those that are yours: sacctmgr show assoc user=$USER format=account,partition"
    ),
    "Invalid qos": "slurm.qos: those that are yours: sacctmgr show assoc user=$USER format=account,qos",
    "nvalid partition": "slurm.partition: sinfo -s lists the partitions",
    "time limit": "slurm.time: sinfo -o '%P %l' lists what each partition allows",
    "Invalid feature": "slurm.constraint: sinfo -o '%P %f' lists what the nodes have",
    "Invalid generic resource": "slurm.gpus_per_node: sinfo -o '%P %G' lists the GPUs and their types",
    "--gpus-per-node and --gres=gpu": (  # since 26.05; a job file sets only one of them
        "the submitting shell exports the other one: unset SBATCH_GRES SBATCH_GPUS_PER_NODE, or set slurm.gpu_option "
        "to what your site wants"
    ),
    "nvalid node name": "slurm.nodelist or slurm.exclude: sinfo -N lists the nodes",
    "node configuration is not available": "no node has all of this: sinfo -o '%P %D %c %m %G' lists what there is",
    "Memory specification": "slurm.mem: sinfo -o '%P %m' lists what the nodes have, in MiB",
    "reservation": "slurm.reservation: scontrol show reservation",
}


def advice(words: str) -> str:
    """Return advice as a line to add to Slurm's message; empty if there is none."""
    return next((f"\nWhat to do: {what}" for sign, what in _ADVICE.items() if sign in words), "")
