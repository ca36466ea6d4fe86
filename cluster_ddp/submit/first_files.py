"""Writes a first job file and a site file for the cluster that this machine belongs to."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster_ddp.job.units import format_slurm_time
from cluster_ddp.slurm.control import cluster_name, default_account
from cluster_ddp.slurm.partitions import NodeKind, Partition, ask_nodes, ask_partitions
from cluster_ddp.submit.base import SubmitError

_SECONDS = 10.0
_TIME = 30 * 60  # seconds; time limit of the first job
_CPUS_PER_RANK = 8
_STORAGE = ("SCRATCH", "PSCRATCH", "WORK", "HOME")
"""Variables that name a user's folder on shared storage, in order of preference."""

_JOB = """\
# A first job, written by cluster-ddp init: {shown}
# All keys: docs/job-file.md. What your jobs have in common belongs in the site file.
task: cluster_ddp.tasks.digits:Digits    # yours: my_package.my_module:MyTask, or my_task.py:MyTask

slurm:
  nodes: 1                  # of at most {most}
  gpus_per_node: {gpus}
  cpus_per_task: {cpus}          # of each node, shared by its ranks
  time: "{time}"

train:
  epochs: 5
  batch_size: 16            # per rank
  lr: 3.0e-3
"""


class Cluster(NamedTuple):
    """What Slurm says about the cluster, as needed for the first files."""

    name: str
    partition: Partition
    nodes: list[NodeKind]
    account: str | None


def ask_cluster() -> Cluster:
    """Query Slurm for the cluster's name, its default partition, the partition's nodes, and this user's account.

    Raises
    ------
    SlurmError
        Slurm is not installed here, or does not answer.
    SubmitError
        There is no partition that is up.
    """
    partitions = [partition for partition in ask_partitions(seconds=_SECONDS) if partition.up]
    if not partitions:
        raise SubmitError("no partition of this cluster is up for you; see: sinfo -s")
    partition = next((known for known in partitions if known.default), partitions[0])
    nodes = ask_nodes(partition.name, seconds=_SECONDS)
    account = default_account(getpass.getuser(), seconds=_SECONDS)
    return Cluster(cluster_name() or "this cluster", partition, nodes, account)


def first_job(cluster: Cluster) -> str:
    """Return the job file: one node of the most common kind, with its GPUs."""
    kind = max(cluster.nodes, key=lambda node: (sum(node.gpus.values()) > 0, node.count), default=None)
    gpus = sum(kind.gpus.values()) if kind else 0
    cpus = min(kind.cpus if kind else 1, _CPUS_PER_RANK * max(gpus, 1))
    alike = sum(node.count for node in cluster.nodes if kind and node.gpus == kind.gpus and node.cpus >= cpus)
    limits = [limit for limit in (_TIME, cluster.partition.max_time) if limit is not None]
    shown = f"partition {cluster.partition.name} of {cluster.name}"
    if kind:
        shown += f", {alike} nodes of {kind.cpus} CPUs and {gpus} GPUs"
    most = min(alike or 1, cluster.partition.max_nodes or alike or 1)
    return _JOB.format(shown=shown, most=most, gpus=gpus, cpus=cpus, time=format_slurm_time(min(limits)))


def site_values(cluster: Cluster, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the contents of the site file: the partition, the account, and the runs folder."""
    storage = next((environment[name] for name in _STORAGE if environment.get(name)), None)
    values: dict[str, Any] = {"slurm": {"partition": cluster.partition.name}}
    if cluster.account:
        values["slurm"]["account"] = cluster.account
    if storage:
        values = {"runs_dir": os.path.join(storage, "cluster_ddp_runs"), **values}  # noqa: PTH118 - text for YAML
    return values
