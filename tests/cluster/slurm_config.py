"""The files that a Slurm of our own reads: slurm.conf, gres.conf, and the fake GPUs."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

# The Slurm to test on: "" for the one that the machine's packages installed, or the folder that holds another one's bin
# and sbin, such as /opt/slurm-26.05. `make test-slurms` takes one after the other.
PREFIX = os.environ.get("TEST_SLURM", "")
GPUS_PER_NODE = 4
CPUS_PER_NODE = 8

SLURM_CONF = """\
ClusterName=cluster-ddp-tests
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/{auth}
CredType={credentials}/{auth}
# A requeued job is held until its credentials have expired: 120 s unless told.
AuthInfo={auth_info}cred_expire=5
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
JobRequeue=1
ReturnToService=2
{accounting}PreemptMode=REQUEUE
SchedulerType=sched/backfill
{parameters}SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000
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

NO_ACCOUNTING = """\
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
"""

NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} CoresPerSocket={cpus} Sockets=1 "
    "ThreadsPerCore=1 RealMemory=64000 Gres=gpu:a100:{gpus} State=UNKNOWN"
)


def version_of(slurmctld: str) -> tuple[int, int]:
    """The release of a Slurm, such as (24, 5), as its controller says it."""
    said = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=30, check=True).stdout
    match = re.match(r"slurm\S* (\d+)\.(\d+)", said)
    if match is None:
        raise RuntimeError(f"{slurmctld} -V gave {said!r}")
    return int(match[1]), int(match[2])


def uses_munge(version: tuple[int, int]) -> bool:
    """Whether a cluster of this release signs with munge; the others have a key of Slurm's own.

    From about 25.05 on a Slurm that was built without ``multiple-slurmd`` takes a credential once only, so that one
    munged cannot serve several nodes of one machine; before that, ``auth/slurm`` does not work here.
    """
    return version < (25, 0)


def write_config(
    folder: Path,
    *,
    version: tuple[int, int],
    proctrack: str,
    nodes: dict[str, str],
    controller: str,
    controller_address: str,
    accounting: str = NO_ACCOUNTING,
) -> Path:
    """Write the configuration of a cluster into `folder` and return the path of its slurm.conf.

    Parameters
    ----------
    folder:
        An existing folder with a short path; the daemons' state and logs go there too.
    version:
        The release of the Slurm that is to read it.
    proctrack:
        "linuxproc" or "pgid": which processes of a step get a signal.
    nodes:
        Name and address of each node.
    accounting:
        What slurm.conf says of accounting, and of who preempts whom.
    """
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    gpus = [folder / f"gpu{number}" for number in range(GPUS_PER_NODE)]
    for gpu in gpus:
        # A twin of /dev/null: Slurm sets CUDA_VISIBLE_DEVICES for device files only.
        os.mknod(gpu, stat.S_IFCHR | 0o666, Path("/dev/null").stat().st_rdev)
    (folder / "gres.conf").write_text("".join(f"Name=gpu Type=a100 File={gpu}\n" for gpu in gpus))
    if version >= (23, 0):  # it would look for the machine's cgroups, which the nodes' namespaces do not have
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    munge = uses_munge(version)
    if not munge:
        key = folder / "slurm.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
    rows = [NODE.format(name=n, address=a, cpus=CPUS_PER_NODE, gpus=GPUS_PER_NODE) for n, a in nodes.items()]
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM_CONF.format(
            folder=folder,
            parameters="SlurmctldParameters=enable_expedited_requeue\n" if version >= (25, 11) else "",
            proctrack=proctrack,
            auth="munge" if munge else "slurm",
            credentials="cred" if munge else "auth",
            auth_info=f"socket={folder}/munge.socket," if munge else "",
            controller=controller,
            controller_address=controller_address,
            nodes="\n".join(rows),
            accounting=accounting,
        )
    )
    return conf


def search_path() -> str:
    """Where programs are looked for: those of the chosen Slurm first."""
    chosen = [f"{PREFIX}/bin", f"{PREFIX}/sbin"] if PREFIX else []
    places = [*chosen, *os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin"]
    return ":".join(dict.fromkeys(filter(None, places)))


def program(name: str) -> str:
    """The path of a program of the chosen Slurm."""
    return shutil.which(name, path=search_path()) or name
