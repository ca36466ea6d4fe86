"""Checks whether a partition can ever run a job: compares the request with its limits and its nodes.

Many clusters accept a job that asks for more, and it then waits forever (PartitionConfig, PartitionTimeLimit).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cluster_ddp.job.nearest import nearest
from cluster_ddp.job.units import format_slurm_time
from cluster_ddp.slurm.partitions import NodeKind, Partition

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, SlurmSpec

Misfit = tuple[str, str]
"""A key of the job file, and what is wrong with its value."""

_MIB = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def find_partition(slurm: SlurmSpec, partitions: Sequence[Partition]) -> Partition | Misfit | None:
    """Find the partition that the job goes to; None if Slurm may choose among several, or the site chooses."""
    if slurm.partition is None:
        return next((partition for partition in partitions if partition.default), None)
    names = [partition.name for partition in partitions]
    for name in slurm.partition.split(","):
        if name not in names:
            near = nearest(name, names)
            meant = f" Did you mean {near}?" if near else ""
            return "slurm.partition", f"there is no partition {name}.{meant} There are: {', '.join(names)}"
    if "," in slurm.partition:
        return None
    return partitions[names.index(slurm.partition)]


def misfits(spec: JobSpec, partition: Partition, nodes: Sequence[NodeKind]) -> Iterator[Misfit]:
    """Yield each request that the partition can never satisfy, with what it allows."""
    yield from _limits(spec.slurm, partition)
    yield from _resources(spec.slurm, partition, nodes)


def _limits(slurm: SlurmSpec, partition: Partition) -> Iterator[Misfit]:
    where = f"partition {partition.name}"
    if slurm.time is not None and partition.max_time is not None and slurm.time > partition.max_time:
        most = format_slurm_time(partition.max_time)
        yield "slurm.time", f"{format_slurm_time(slurm.time)} is more than {where} allows: {most}"
    if partition.max_nodes is not None and slurm.nodes > partition.max_nodes:
        yield "slurm.nodes", f"{slurm.nodes} is more than {where} allows: {partition.max_nodes}"
    if slurm.nodes < partition.min_nodes:
        yield "slurm.nodes", f"{slurm.nodes} is less than {where} requires: {partition.min_nodes}"
    if slurm.account is not None and partition.accounts and slurm.account not in partition.accounts:
        yield "slurm.account", f"{where} takes no jobs of {slurm.account}, only of {', '.join(partition.accounts)}"
    if slurm.account is not None and slurm.account in partition.denied_accounts:
        yield "slurm.account", f"{where} takes no jobs of {slurm.account}"
    if slurm.qos is not None and partition.qos and slurm.qos not in partition.qos:
        yield "slurm.qos", f"{where} does not allow {slurm.qos}, only {', '.join(partition.qos)}"
    cpus, memory = slurm.cpus_per_task or 1, mebibytes(slurm.mem)
    if partition.max_cpus is not None and cpus > partition.max_cpus:
        yield "slurm.cpus_per_task", f"{cpus} is more than {where} allows on a node: {partition.max_cpus}"
    if partition.max_memory and memory > partition.max_memory:
        yield "slurm.mem", f"{slurm.mem} is more than {where} allows on a node: {partition.max_memory} MiB"


def _resources(slurm: SlurmSpec, partition: Partition, nodes: Sequence[NodeKind]) -> Iterator[Misfit]:
    where, cpus, memory = f"partition {partition.name}", slurm.cpus_per_task or 1, mebibytes(slurm.mem)
    if not nodes:
        return
    found = False
    if cpus > (most := max(node.cpus for node in nodes)):
        found = True
        yield "slurm.cpus_per_task", f"{cpus} is more than any node of {where} has: {most}"
    if memory > (most := max(node.memory for node in nodes)):
        found = True
        yield "slurm.mem", f"{slurm.mem} is more than any node of {where} has: {most} MiB"
    if slurm.gpu_count > (most := max(_gpus(slurm, node) for node in nodes)):
        found = True
        kinds = sorted({kind or "gpu" for node in nodes for kind in node.gpus})
        have = f"{most}" + (f" (of the types {', '.join(kinds)})" if kinds and slurm.gpu_type else "")
        yield "slurm.gpus_per_node", f"{slurm.gpus_per_node} is more than any node of {where} has: {have}"
    if found:
        return
    fitting = sum(
        node.count
        for node in nodes
        if node.cpus >= cpus and node.memory >= memory and _gpus(slurm, node) >= slurm.gpu_count
    )
    if slurm.nodes > fitting:
        asked = f"{cpus} CPUs" + (f", {slurm.mem} of memory" if slurm.mem else "")
        asked += f", {slurm.gpus_per_node} GPUs" if slurm.gpu_count else ""
        yield "slurm.nodes", f"{slurm.nodes} is more than {where} has with {asked} each: {fitting}"


def _gpus(slurm: SlurmSpec, node: NodeKind) -> int:
    return node.gpus.get(slurm.gpu_type, 0) if slurm.gpu_type else sum(node.gpus.values())


def mebibytes(memory: str | None) -> float:
    """Convert a size in sbatch's form to MiB; 0 without a size (then ``--mem=0``, all of a node, fits as well)."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", (memory or "").upper())
    return int(found[1]) * _MIB[found[2]] if found else 0
