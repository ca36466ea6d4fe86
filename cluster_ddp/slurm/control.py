"""Queries Slurm about a job and its nodes, and changes the job, with scontrol and sinfo."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from cluster_ddp.job.units import parse_slurm_time
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused, call, call_once
from cluster_ddp.slurm.job_info import JobInfo, parse_job, unix_time
from cluster_ddp.slurm.nodelist import NodeListError, expand
from cluster_ddp.slurm.shown import shown_fields
from cluster_ddp.slurm.start import SlurmStart
from cluster_ddp.slurm.states import LETS_RUN

PARTITION_GONE = "its partition was removed"
"""In the refusal of a requeue."""

BRIEF_SECONDS = 5.0
"""For an answer that is not essential, or while the end is near."""

BUSY_SITE_SECONDS = 60.0
"""For one that matters: on a busy site an answer may take 40 s."""

_SECONDS = 20.0
_REQUEUE_SECONDS = 60.0  # a call that timed out may have been accepted nevertheless
DEFAULT_KILL_WAIT = 30.0
"""Slurm's own, if it cannot be queried."""

DEFAULT_MAX_ARRAY_SIZE = 1001
"""The same."""


def show_job(job_id: str, *, seconds: float) -> JobInfo | None:
    """Return what Slurm says about a job; None without an answer in time."""
    try:
        return parse_job(call_once(["scontrol", "show", "job", "-o", job_id], seconds=seconds))
    except SlurmError:
        return None


def kill_wait(*, seconds: float) -> float | None:
    """Return the seconds between SIGTERM and SIGKILL when Slurm ends a job; None without an answer in `seconds`."""
    return _configured("KillWait", seconds=seconds)


def max_array_size() -> int:
    """Return the maximum number of tasks of a job array; Slurm's own default if it cannot be queried."""
    found = _configured("MaxArraySize", seconds=_SECONDS)
    return int(found) if found is not None else DEFAULT_MAX_ARRAY_SIZE


@functools.cache
def configuration() -> str:
    """Return Slurm's configuration as it was when first asked for; empty if it cannot be queried."""
    try:
        return _ask_configuration(seconds=_SECONDS / 4)
    except SlurmError:
        return ""


def cluster_name() -> str | None:
    """Return what Slurm calls this cluster, in lower case, as it does not tell cases apart; None if not known."""
    name = _setting("ClusterName", configuration())
    return name.lower() if name else None


def hides_jobs_of_others() -> bool:
    """Whether Slurm shows people only their own jobs; False if it cannot be queried."""
    hidden = _setting("PrivateData", configuration()) or ""
    return not {"jobs", "all"}.isdisjoint(hidden.lower().split(","))


def _configured(key: str, *, seconds: float) -> float | None:
    try:
        config = _ask_configuration(seconds=seconds)
    except SlurmError:
        return None
    value = _setting(key, config)
    return float(value) if value and value.isdecimal() else None


def _ask_configuration(*, seconds: float) -> str:
    return call_once(["scontrol", "show", "config"], seconds=seconds)


def _setting(key: str, config: str) -> str | None:
    """The first word of a setting in what ``scontrol show config`` shows; None if it is not there."""
    found = re.search(rf"^{key}\s*=[^\S\n]*(\S+)", config, re.MULTILINE)
    return found[1] if found else None


def grace_time(partition: str, qos: str) -> float:
    """Return the grace of a preempted job in seconds, from its partition or its QOS, whichever decides preemption here.

    0 if there is no grace, or Slurm does not answer.
    """
    seconds = _SECONDS / 4
    try:
        if "qos" in (_setting("PreemptType", _ask_configuration(seconds=seconds)) or ""):
            shown = call_once(["sacctmgr", "-nP", "show", "qos", qos, "format=GraceTime"], seconds=seconds)
            return float(parse_slurm_time(shown.strip()))
        answer = call_once(["scontrol", "show", "partition", "--all", "-o", partition], seconds=seconds)
    except (SlurmError, ValueError):
        return 0.0
    grace = shown_fields(answer).get("GraceTime", "")
    return float(grace) if grace.isdecimal() else 0.0


def requeue_job(task: str, partition: str) -> None:
    """Requeue a job. Slurm ends what is still running of it, including its batch script. This does not retry."""
    try:
        call_once(["scontrol", "requeue", task], seconds=_REQUEUE_SECONDS)
    except SlurmRefused as error:
        if not _is_gone(partition):
            raise
        raise SlurmRefused(f"{PARTITION_GONE} (sinfo -s lists what exists): {partition}") from error


def _is_gone(partition: str) -> bool:
    """Whether Slurm has no partition of this name any more."""
    if not partition:
        return False
    try:
        call_once(["scontrol", "show", "partition", "--all", "-o", partition], seconds=_SECONDS / 4)
    except SlurmError as error:
        return "not found" in str(error)
    return False


def forbid_requeue(task: str) -> None:
    """Keep Slurm from requeuing a job by itself."""
    call_once(["scontrol", "update", f"JobId={task}", "Requeue=0"], seconds=_SECONDS)


def exclude_hosts(task: str, hosts: Sequence[str]) -> None:
    """Exclude further hosts from a job; possible only while it is queued."""
    job = _job(task)
    excluded = job.excluded if job else ""
    known = _hosts(excluded)
    if new := [host for host in hosts if host not in known]:
        names = ",".join(filter(None, [excluded, *new]))
        call(["scontrol", "update", f"JobId={task}", f"ExcNodeList={names}"], seconds=_SECONDS)


def taken_hosts(start: SlurmStart) -> list[str]:
    """Return the hosts of a start that its job no longer has although Slurm lets it run: it was made smaller.

    Empty if Slurm cannot be queried.
    """
    job = show_job(start.task, seconds=_SECONDS / 2)
    if job is None or job.state not in LETS_RUN or job.restarts != str(start.restart_count) or not job.nodes:
        return []
    try:
        has_now = set(expand(job.nodes))
    except NodeListError:
        return []
    return [host for host in start.hosts if host not in has_now]


def required_hosts(task: str) -> list[str]:
    """Return the hosts that a job requests by name."""
    job = _job(task)
    return _hosts(job.required) if job else []


def closed_hosts(start: SlurmStart) -> list[str]:
    """Return the hosts that are closed to a job.

    Those that it excludes, and the nodes of its partition that have fewer CPUs or less memory than it requests, or that
    differ from all of its present ones in the features that it names, or in the GPUs if it requests any. Of a job in a
    reservation all other nodes, else those that are reserved at present.
    """
    job = _job(start.task)
    if job is None:
        return []
    named, closed = frozenset(re.findall(r"[\w.-]+", job.features)), _hosts(job.excluded)
    own, reserved = _reserved_hosts(job.reservation)
    if not (named or job.gres or job.cpus > 1 or job.memory or job.reservation):
        return closed + reserved
    nodes = _nodes(start.partition)
    kinds = {  # of GPUs without their sockets, as in gpu:a100:4(S:0-1)
        node.host: (named.intersection(node.features.split(",")), re.sub(r"\(.*?\)", "", node.gres) if job.gres else "")
        for node in nodes
    }
    present = {kinds[host] for host in start.hosts if host in kinds}
    too_small = {node.host for node in nodes if _less(node.cpus, job.cpus) or _less(node.memory, job.memory)}
    elsewhere = {node.host for node in nodes}.difference(own) if job.reservation else set(reserved)
    return closed + [host for host, kind in kinds.items() if kind not in present or host in too_small | elsewhere]


def _reserved_hosts(names: str) -> tuple[list[str], list[str]]:
    """Return the hosts of the reservations with these names, and those that are reserved at present by others."""
    answer = call(["scontrol", "show", "reservation", "-o"], seconds=_SECONDS)
    own: list[str] = []
    others: list[str] = []
    shown = r"^ReservationName=(\S+) .*?(?<!\S)Nodes=([^\s(]\S*) .*?(?<!\S)State=(\S+)"
    for name, nodes, state in re.findall(shown, answer, re.MULTILINE):
        if name in names.split(","):
            own += _hosts(nodes)
        elif state == "ACTIVE":
            others += _hosts(nodes)
    return own, others


class _Node(NamedTuple):
    """A node as sinfo shows it."""

    host: str
    features: str
    gres: str
    cpus: str
    memory: str  # MiB


def _nodes(partition: str) -> list[_Node]:
    """Return the nodes of a partition."""
    command = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%f|%G|%c|%m"]
    lines = (line.strip().split("|") for line in call(command, seconds=_SECONDS).splitlines())
    return [_Node(*fields) for fields in lines if len(fields) == len(_Node._fields)]


def _less(has: str, needed: float) -> bool:
    return has.isdigit() and float(has) < needed


def usable_nodes(partition: str) -> set[str]:
    """Return the nodes of a partition on which jobs run or may run."""
    states = "--states=idle,mixed,allocated,completing"
    command = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N", states]
    lines = (line.split() for line in call(command, seconds=_SECONDS).splitlines())
    return {words[0] for words in lines if len(words) == 1}  # skips a site's greeting


def all_nodes(partition: str) -> set[str]:
    """Return the nodes of a partition in any state."""
    return {node.host for node in _nodes(partition)}


def down_nodes(hosts: Sequence[str]) -> list[str]:
    """Return those of the hosts that Slurm considers down; empty if it cannot be queried."""
    shown = ["--all", "--Node", "--format=%N", "--states=down,fail"]  # --all: in hidden partitions, too
    command = ["sinfo", "--noheader", *shown, f"--nodes={','.join(hosts)}"]
    try:
        answer = call_once(command, seconds=_SECONDS / 2)
    except SlurmError:
        return []
    return sorted(set(answer.split()) & set(hosts))


def boot_times(hosts: Sequence[str]) -> dict[str, float]:
    """Return when each of the hosts was booted, in Unix seconds by its own clock, as far as Slurm knows."""
    try:
        answer = call_once(["scontrol", "show", "node", "-o", ",".join(hosts)], seconds=_SECONDS / 2)
    except SlurmError:
        return {}
    found = re.findall(r"^NodeName=(\S+) .*?(?<!\S)BootTime=(\S+)", answer, re.MULTILINE)
    booted = {host: unix_time(shown) for host, shown in found}
    return {host: moment for host, moment in booted.items() if moment is not None}


def default_account(user: str, *, seconds: float) -> str | None:
    """Return a user's default account; None without accounting."""
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=DefaultAccount"]
    try:
        answer = call_once(command, seconds=seconds).strip()
    except SlurmError:
        return None
    return answer.splitlines()[0] if answer else None


def _job(task: str) -> JobInfo | None:
    return parse_job(call(["scontrol", "show", "job", "-o", task], seconds=_SECONDS))


def _hosts(node_list: str) -> list[str]:
    """Expand a node list as Slurm writes it."""
    try:
        return expand(node_list) if node_list else []
    except NodeListError:
        return call(["scontrol", "show", "hostnames", node_list], seconds=_SECONDS).split()
