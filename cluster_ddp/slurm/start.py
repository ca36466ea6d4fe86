"""Determines which start of which job this process belongs to, from Slurm's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmStart:
    """One start of a Slurm job. Slurm restarts a job under the same id and counts the restarts."""

    job_id: str  # a number; for an array task, the task's own
    # The job's name wherever it is recorded or queried: for an array task ``<array>_<task>``, since one task's number
    # equals the array's, which stands for all of them
    task: str
    restart_count: int  # 0 for the first start
    nodes: int  # how many nodes it has; 0 if Slurm does not say
    node_list: str  # their names as Slurm writes them
    partition: str
    batch_host: str  # what Slurm calls the node that runs the batch script; empty if it does not say
    cluster: str = ""  # what it calls the cluster; empty if it does not say
    components: int = 1  # of a heterogeneous job; what is said above is about the first one, which runs the script

    @property
    def hosts(self) -> list[str]:
        """Its nodes in the order of their ranks; empty if Slurm's list cannot be parsed."""
        from cluster_ddp.slurm.nodelist import NodeListError, expand  # needed only if a node is suspected

        try:
            return expand(self.node_list)
        except (NodeListError, ImportError):
            return []


def this_start(environment: Mapping[str, str]) -> SlurmStart | None:
    """Return the start that an environment describes; None outside of Slurm jobs."""
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return SlurmStart(
        job_id=job_id,
        task=f"{array}_{task}" if array else job_id,
        restart_count=_count(environment.get("SLURM_RESTART_COUNT")),
        nodes=_count(environment.get("SLURM_JOB_NUM_NODES")),
        node_list=environment.get("SLURM_JOB_NODELIST", ""),
        partition=environment.get("SLURM_JOB_PARTITION", ""),
        batch_host=environment.get("SLURMD_NODENAME", ""),
        cluster=environment.get("SLURM_CLUSTER_NAME", ""),
        components=_count(environment.get("SLURM_HET_SIZE")) or 1,
    )


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to call srun in: since Slurm 22.05 it does not inherit --cpus-per-task from sbatch."""
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    return {**environment, **({"SRUN_CPUS_PER_TASK": cpus} if cpus else {})}


def _count(value: str | None) -> int:
    return int(value) if value and value.isdigit() else 0
