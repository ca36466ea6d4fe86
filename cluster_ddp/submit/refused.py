"""What to do when Slurm refuses a job: by which key of the job file, and how to list what the cluster allows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cluster_ddp.slurm.commands import SlurmRefused

NO_NODE_FITS = "node configuration is not available"
"""In Slurm's refusal of a job that no node fits, or none that is up."""

_ADVICE = {  # the first match counts: "violates accounting/QOS policy" mentions time limits, too
    "SubmitJob": (
        "a limit on jobs in the queue, where each element of a sweep and each job of a chain counts (squeue --me): "
        "wait until some have ended, or ask for fewer"
    ),
    "violates accounting/QOS policy": (
        "a limit of your account or QOS: sacctmgr show assoc user=$USER, sacctmgr show qos"
    ),
    "Invalid account or account/partition": (
        "slurm.account: to list yours: sacctmgr show assoc user=$USER format=account,partition"
    ),
    "Invalid qos": "slurm.qos: to list yours: sacctmgr show assoc user=$USER format=account,qos",
    "partition not available": "slurm.partition: it is not taking jobs now; sinfo -s lists those that are up",
    "nvalid partition": "slurm.partition: sinfo -s lists the partitions",
    "time limit": "slurm.time: sinfo -o '%P %l' lists what each partition allows",
    "Invalid feature": "slurm.constraint: sinfo -o '%P %f' lists what the nodes have",
    "Invalid generic resource": "slurm.gpus_per_node: sinfo -o '%P %G' lists the GPUs and their types",
    "--gpus-per-node and --gres=gpu": (  # since 26.05; a job file sets only one of them
        "the submitting shell exports the other one: unset SBATCH_GRES SBATCH_GPUS_PER_NODE, or set slurm.gpu_option "
        "to what your site wants"
    ),
    "nvalid node name": "slurm.nodelist or slurm.exclude: sinfo -N lists the nodes",
    NO_NODE_FITS: "no node has all of this: sinfo -o '%P %D %c %m %G' lists what there is",
    "Memory specification": "slurm.mem: sinfo -o '%P %m' lists what the nodes have, in MiB",
    "reservation": "slurm.reservation: scontrol show reservation",
}


@contextlib.contextmanager
def advised() -> Iterator[None]:
    """Add to Slurm's message what to do, if it refuses what the block submits."""
    try:
        yield
    except SlurmRefused as error:
        what = next((f"\nWhat to do: {what}" for sign, what in _ADVICE.items() if sign in str(error)), "")
        raise SlurmRefused(f"{error}{what}") from error
