"""What to do about each error with which Slurm refuses a job."""

from __future__ import annotations

_ADVICE = {  # the first sign that is found counts: "violates accounting/QOS policy" speaks of time limits, too
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
    "--gpus-per-node and --gres=gpu": (  # since 26.05; a job file gives one of them
        "the shell that submits gives the other one: unset SBATCH_GRES SBATCH_GPUS_PER_NODE, or set slurm.gpu_option "
        "to what your site wants"
    ),
    "nvalid node name": "slurm.nodelist or slurm.exclude: sinfo -N lists the nodes",
    "node configuration is not available": "no node has all of this: sinfo -o '%P %D %c %m %G' lists what there is",
    "Memory specification": "slurm.mem: sinfo -o '%P %m' lists what the nodes have, in MiB",
    "reservation": "slurm.reservation: scontrol show reservation",
}


def advice(words: str) -> str:
    """What to do, as a line to add to Slurm's words; empty where nothing is known."""
    return next((f"\nWhat to do: {what}" for sign, what in _ADVICE.items() if sign in words), "")
