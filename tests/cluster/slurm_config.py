"""The files that a Slurm of our own reads: slurm.conf, gres.conf, and the fake GPUs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

GPUS_PER_NODE = 4
CPUS_PER_NODE = 8

SLURM_CONF = """\
ClusterName=cluster-ddp-tests
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job is held until its credentials have expired: 120 s unless told.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
JobRequeue=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000
KillWait=5
MinJobAge=600
InactiveLimit=0
SlurmdTimeout=15
SlurmctldTimeout=30
MessageTimeout=15
TCPTimeout=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# The nodes are made up: do not compare them with the machine underneath.
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=cancel Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0 PreemptMode=CANCEL
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} CoresPerSocket={cpus} Sockets=1 "
    "ThreadsPerCore=1 RealMemory=64000 Gres=gpu:a100:{gpus} State=UNKNOWN"
)


def write_config(
    folder: Path, *, proctrack: str, nodes: dict[str, str], controller: str, controller_address: str
) -> Path:
    """Write the configuration of a cluster into `folder` and return the path of its slurm.conf.

    Parameters
    ----------
    folder:
        An existing folder with a short path; the daemons' state and logs go there too.
    proctrack:
        "linuxproc" or "pgid": which processes of a step get a signal.
    nodes:
        Name and address of each node.
    """
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    gpus = [folder / f"gpu{number}" for number in range(GPUS_PER_NODE)]
    for gpu in gpus:
        # A twin of /dev/null: Slurm sets CUDA_VISIBLE_DEVICES for device files only.
        os.mknod(gpu, stat.S_IFCHR | 0o666, Path("/dev/null").stat().st_rdev)
    (folder / "gres.conf").write_text("".join(f"Name=gpu Type=a100 File={gpu}\n" for gpu in gpus))
    rows = [NODE.format(name=n, address=a, cpus=CPUS_PER_NODE, gpus=GPUS_PER_NODE) for n, a in nodes.items()]
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM_CONF.format(
            folder=folder,
            proctrack=proctrack,
            controller=controller,
            controller_address=controller_address,
            nodes="\n".join(rows),
        )
    )
    return conf
