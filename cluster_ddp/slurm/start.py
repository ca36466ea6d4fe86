"""Which start of which job this process belongs to, from Slurm's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SlurmStart:
    """One start of a Slurm job. Slurm starts a job again under the same id and counts."""

    job_id: str  # a number; of a task of an array, the task's own
    # How the job is named wherever it is written down or asked about: of an array ``<array>_<task>``, since the number
    # of one of its tasks is the array's, and stands for all of them
    task: str
    restart_count: int  # 0 at the first start
    nodes: int  # how many nodes it has; 0 where Slurm does not say
    node_list: str  # their names as Slurm writes them
    partition: str
    batch_host: str  # what Slurm calls the node that runs the batch script; empty where it does not say

    @property
    def hosts(self) -> list[str]:
        """Its nodes in the order of their ranks; none where Slurm's list cannot be read."""
        from cluster_ddp.slurm.nodelist import NodeListError, expand  # only where a node is suspected

        try:
            return expand(self.node_list)
        except (NodeListError, ImportError):
            return []


def this_start(environment: Mapping[str, str]) -> SlurmStart | None:
    """The start that an environment describes; None outside of Slurm's jobs."""
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
    )


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to call srun in: since Slurm 22.05 it does not take --cpus-per-task over from sbatch."""
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    return {**environment, **({"SRUN_CPUS_PER_TASK": cpus} if cpus else {})}


def _count(value: str | None) -> int:
    return int(value) if value and value.isdigit() else 0
