"""Accounting for a Slurm of our own: a database, slurmdbd, and the limits and preemption that need them.

Of QOS there are ``normal`` (everybody's default; preempted jobs get 20 s of grace and are requeued), ``urgent`` (which
preempts them) and ``one-node`` (a user may have one node at once). Preemption goes by QOS then, not by partition.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from slurm_config import program, uses_munge
from virtual_hosts import Host, sh, wait_until

ACCOUNTING_PACKAGES = {
    "mariadbd": "mariadb-server-core", "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core", "slurmdbd": "slurmdbd",
}  # fmt: skip
QOS_GRACE = 20
# In a network namespace of its own, and in a data folder that goes with the cluster.
DATABASE = (
    "mariadbd", "--no-defaults", "--user=root", "--skip-networking", "--skip-grant-tables",
    "--innodb-flush-log-at-trx-commit=0", "--innodb-log-file-size=8M",
)  # fmt: skip
SLURMDBD_CONF = """\
AuthType=auth/{auth}
{auth_info}DbdHost={host}
DbdAddr={address}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
DebugLevel=verbose
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=accounting
"""
# What slurm.conf says of it. AccountingStoragePass is munge's socket there.
SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
{password}AccountingStorageEnforce=limits,qos
AccountingStoreFlags=job_comment
PreemptType=preempt/qos
"""
RECORDS = (
    ("add", "cluster", "cluster-ddp-tests"),
    ("add", "account", "tests", "cluster=cluster-ddp-tests"),
    ("modify", "qos", "normal", "set", f"GraceTime={QOS_GRACE}", "PreemptMode=requeue"),
    ("add", "qos", "urgent", "set", "Priority=100", "Preempt=normal"),
    ("add", "qos", "one-node", "set", "MaxTRESPerUser=node=1"),
    ("add", "user", "root", "account=tests", "DefaultAccount=tests", "qos=normal,urgent,one-node", "DefaultQOS=normal"),
)


def write_slurmdbd_conf(folder: Path, version: tuple[int, int], host: Host) -> str:
    """Write slurmdbd.conf, which only its owner may read, beside slurm.conf; returns what slurm.conf is to say."""
    conf = folder / "slurmdbd.conf"
    conf.touch(mode=0o600)
    munge = uses_munge(version)
    auth, sock = "munge" if munge else "slurm", f"{folder}/munge.socket"
    info = f"AuthInfo=socket={sock}\n" if munge else ""
    conf.write_text(
        SLURMDBD_CONF.format(folder=folder, host=host.name, address=host.address, auth=auth, auth_info=info)
    )
    return SLURM_CONF.format(address=host.address, password=f"AccountingStoragePass={sock}\n" if munge else "")


def start_accounting(folder: Path, host: Host, env: dict[str, str], logs: Callable[[], str]) -> None:
    """Start the database and slurmdbd on a host, and record the QOS and the user. slurmctld comes after them.

    Parameters
    ----------
    env:
        What Slurm's commands need.
    logs:
        The daemons' logs, for the message when one of them does not come up.
    """
    data = folder / "database"
    (temporary := folder / "database.tmp").mkdir()  # two of them at once would take each other's files
    where = (f"--datadir={data}", f"--tmpdir={temporary}")
    install = ["mariadb-install-db", *DATABASE[1:3], *where, "--skip-test-db"]
    sh(*install, "--auth-root-authentication-method=normal", timeout=120)
    sock = host.run_folder / "mysqld" / "mysqld.sock"  # where the client library looks for it
    sock.parent.mkdir()
    database = [*DATABASE, *where, "--socket=/run/mysqld/mysqld.sock", f"--pid-file={folder}/database.pid"]
    host.spawn(database, log=folder / "database.log", env=env)
    wait_until(sock.exists, 60, f"the database has its socket\n{logs()}")
    host.spawn([program("slurmdbd"), "-D"], log=folder / "slurmdbd.out", env=env)
    if "SLURM_SACK_SOCKET" in env:  # that of slurmctld, which is not up yet
        env = {**env, "SLURM_SACK_SOCKET": str(host.run_folder / "slurmdbd" / "sack.socket")}

    def sacctmgr(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sacctmgr", *words], env=env, capture_output=True, text=True, timeout=60, check=False)

    wait_until(lambda: sacctmgr("list", "cluster").returncode == 0, 60, f"slurmdbd answers\n{logs()}")
    for record in RECORDS:
        done = sacctmgr("--immediate", *record)
        assert done.returncode == 0, f"{record}: {done.stdout} {done.stderr}"
