"""The limits of partitions and the resources of their nodes, parsed from ``scontrol show partition`` and ``sinfo``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster_ddp.job.units import parse_slurm_time
from cluster_ddp.slurm.commands import call_once
from cluster_ddp.slurm.shown import shown_fields

NODES_FORMAT = "%D|%c|%m|%G"
"""What sinfo is asked of nodes that are alike: how many, CPUs, MiB, gres."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    count: int
    cpus: int
    memory: int  # MiB
    gpus: dict[str, int]  # by type; "" if the cluster names none


@dataclass(frozen=True)
class Partition:
    """A partition; limits are None if there are none, and empty if everything is allowed."""

    name: str
    default: bool
    up: bool
    max_time: int | None  # seconds
    min_nodes: int
    max_nodes: int | None
    max_cpus: int | None  # per node
    max_memory: int | None  # per node, MiB
    accounts: tuple[str, ...]
    denied_accounts: tuple[str, ...]
    qos: tuple[str, ...]
    grace: int  # seconds that a preempted job has
    preempted: bool  # whether jobs of other partitions may preempt its jobs, as far as it says


def ask_partitions(*, seconds: float) -> list[Partition]:
    """Return all partitions, including hidden ones; raises `SlurmError` without an answer in time."""
    return parse_partitions(call_once(["scontrol", "show", "partition", "--all", "-o"], seconds=seconds))


def ask_nodes(partition: str, *, seconds: float) -> list[NodeKind]:
    """Return the nodes of a partition, in any state; raises `SlurmError` without an answer in time."""
    command = ["sinfo", "--noheader", "--exact", f"--partition={partition}", f"--format={NODES_FORMAT}"]
    return parse_nodes(call_once(command, seconds=seconds))


def parse_partitions(answer: str) -> list[Partition]:
    """Parse the lines of ``scontrol show partition -o``."""
    fields = [shown_fields(line) for line in answer.splitlines()]
    return [_partition(shown) for shown in fields if shown.get("PartitionName")]


def parse_nodes(answer: str) -> list[NodeKind]:
    """Parse sinfo's lines ``count|CPUs|MiB|gres``."""
    kinds = []
    for line in answer.splitlines():
        count, cpus, memory, gres = [*line.strip().split("|", 3), "", "", "", ""][:4]
        if count.isdigit() and cpus.isdigit() and memory.isdigit():
            gpus: dict[str, int] = {}
            for kind, number in re.findall(r"gpu(?::([^:,(]*[^:,(\d][^:,(]*))?:(\d+)", gres):
                gpus[kind] = gpus.get(kind, 0) + int(number)
            kinds.append(NodeKind(int(count), int(cpus), int(memory), gpus))
    return kinds


def _partition(shown: dict[str, str]) -> Partition:
    return Partition(
        name=shown["PartitionName"],
        default=shown.get("Default") == "YES",
        up=shown.get("State", "UP") == "UP",
        max_time=_seconds(shown.get("MaxTime", "")),
        min_nodes=_number(shown.get("MinNodes", "")) or 0,
        max_nodes=_number(shown.get("MaxNodes", "")),
        max_cpus=_number(shown.get("MaxCPUsPerNode", "")),
        max_memory=_number(shown.get("MaxMemPerNode", "")),
        accounts=_names(shown.get("AllowAccounts", "")),
        denied_accounts=_names(shown.get("DenyAccounts", "")),
        qos=_names(shown.get("AllowQos", "")),
        grace=_number(shown.get("GraceTime", "")) or 0,
        preempted=shown.get("PreemptMode", "OFF") not in ("OFF", "SUSPEND"),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _seconds(text: str) -> int | None:
    try:
        return parse_slurm_time(text)
    except ValueError:  # UNLIMITED, INFINITE
        return None


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("", "ALL", "(null)", "NONE") else tuple(text.split(","))
