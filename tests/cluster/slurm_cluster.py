"""A real Slurm for tests: three nodes and a controller on this machine, up in seconds and gone without a trace.

    with SlurmCluster() as cluster:
        job = cluster.sbatch("#!/bin/bash", "srun hostname", nodes=3)
        cluster.wait_for_state(job, "COMPLETED")

Partitions: ``debug`` (default; preempted jobs get 10 s of grace and are requeued), ``cancel`` (preempted jobs are
cancelled without grace) and ``urgent`` (preempts the others). The commands of Slurm run on this machine: see
`LoginNode`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from login_node import LoginNode
from slurm_accounting import ACCOUNTING_PACKAGES, start_accounting, write_slurmdbd_conf
from slurm_config import NO_ACCOUNTING, PREFIX, program, search_path, uses_munge, version_of, write_config
from virtual_hosts import Host, Network, Process, sh, wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
CONTROLLER = "ctl"
PACKAGES = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge", "ip": "iproute2",
    "nsenter": "util-linux", "setpriv": "util-linux",
}  # fmt: skip
# Of the environment of whoever runs the tests: what would make a job, or a command, think it is somewhere else.
FOREIGN = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|CLUSTER_DDP|MASTER|TORCH|WANDB|GLOO|NCCL)_?")


def why_unavailable(*, accounting: bool = False) -> str | None:
    """What this machine lacks for a cluster of its own, as a reason to read; None where it lacks nothing."""
    if sys.platform != "linux":
        return "a Slurm cluster for the tests needs Linux"
    if os.geteuid() != 0:
        return "a Slurm cluster for the tests needs root (it makes network namespaces and runs Slurm's daemons)"
    needed = PACKAGES | (ACCOUNTING_PACKAGES if accounting else {})
    missing = sorted({package for name, package in needed.items() if not shutil.which(name, path=search_path())})
    if PREFIX and not Path(PREFIX, "sbin/slurmctld").exists():
        return f"no Slurm for the tests: TEST_SLURM={PREFIX} has no sbin/slurmctld"
    if missing:
        return f"no Slurm for the tests: apt-get install {' '.join(missing)}"
    trial = subprocess.run(["unshare", "--fork", "--pid", "--mount-proc", "--net", "--uts", "--mount", "true"],
                           capture_output=True, text=True, timeout=30, check=False)  # fmt: skip
    if trial.returncode:
        return f"a Slurm cluster for the tests needs the right to make namespaces: {trial.stderr.strip()}"
    return None


class SlurmCluster(LoginNode):
    """A cluster of ``node1``, ``node2`` and ``node3``; a context manager.

    Parameters
    ----------
    proctrack:
        How Slurm finds a step's processes, which decides who gets its signals: "linuxproc" or "pgid".
    accounting:
        With a database of accounts and limits, and preemption by QOS: see `slurm_accounting`.
    """

    def __init__(self, proctrack: str = "linuxproc", *, accounting: bool = False) -> None:
        self.proctrack = proctrack
        self.accounting = accounting
        self.nodes = ("node1", "node2", "node3")
        self._network = Network([*self.nodes, CONTROLLER])
        self._python_path: Path | None = None

    # -- up and down ---------------------------------------------------------------------------------------------

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Bring everything up and wait until all nodes are idle; takes everything down again if that fails."""
        self.version = version_of(program("slurmctld"))
        self._network.start()
        try:
            hosts = self._network.hosts
            self.conf = write_config(
                self.folder,
                version=self.version,
                proctrack=self.proctrack,
                nodes={name: hosts[name].address for name in self.nodes},
                controller=CONTROLLER,
                controller_address=hosts[CONTROLLER].address,
                accounting=write_slurmdbd_conf(self.folder, self.version, self._controller)
                if self.accounting
                else NO_ACCOUNTING,
            )
            self.env = self._environment()
            if uses_munge(self.version):
                self._start_munged()
            if self.accounting:
                start_accounting(self.folder, self._controller, self.env, self.logs)
            self.start_slurmctld()
            for node in self.nodes:
                self.start_slurmd(node, wait=False)
            wait_until(self._all_idle, 60, f"all nodes are idle\n{self.logs()}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the cluster and remove what it made on this machine."""
        self._network.stop()

    @property
    def folder(self) -> Path:
        """Configuration, state and logs of the cluster."""
        return self._network.folder

    def _environment(self) -> dict[str, str]:
        """What a person's shell on the login node would have."""
        env = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        env["PATH"] = f"{Path(sys.executable).parent}:{search_path()}"
        env["SLURM_CONF"] = str(self.conf)
        env["CLUSTER_DDP_CONFIG"] = ""  # no site file of whoever runs the tests
        if not uses_munge(self.version):
            env["SLURM_SACK_SOCKET"] = str(self._controller.run_folder / "slurmctld" / "sack.socket")
        env["OMP_NUM_THREADS"] = "1"
        if not _installed_from_here():
            env["PYTHONPATH"] = ":".join(filter(None, [str(CHECKOUT), env.get("PYTHONPATH", "")]))
        return env

    def _start_munged(self) -> None:
        """A munged of our own, so that the machine's own one, if any, is left alone."""
        key, sock = self.folder / "munge.key", self.folder / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        command = [program("munged"), "--foreground", "--key-file", str(key), "--socket", str(sock)]
        for name in ("pid", "seed"):
            command += [f"--{name}-file", str(self.folder / f"munged.{name}")]
        self._controller.spawn(command, log=self.folder / "munged.log", env=self.env)
        wait_until(sock.exists, 20, f"munged has its socket\n{self.logs()}")

    @property
    def _controller(self) -> Host:
        return self._network.hosts[CONTROLLER]

    def start_slurmctld(self) -> None:
        """Start the controller; what it knew is taken up again."""
        command = [program("slurmctld"), "-D", "-f", str(self.conf)]
        self._controller.spawn(command, log=self.folder / "slurmctld.out", env=self.env)

    def kill_slurmctld(self) -> None:
        """kill -9 of the controller; jobs live on, and nobody answers until `start_slurmctld`."""
        for process in self._slurmctlds():
            self.kill(process)
        wait_until(lambda: not self._slurmctlds(), 10, "slurmctld is gone")

    def _slurmctlds(self) -> list[Process]:
        return [p for p in self._controller.processes() if Path(p.arguments[0]).name == "slurmctld"]

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=debug", check=False).split()
        return states == [word for node in self.nodes for word in (node, "idle")]

    def logs(self, lines: int = 30) -> str:
        """See the base class."""
        parts = []
        for log in sorted(self.folder.glob("*.log")):
            text = log.read_text(errors="replace").splitlines()[-lines:]
            if text:
                parts.append(f"--- {log.name}\n" + "\n".join(text))
        return "\n".join(parts)

    @contextlib.contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """More lines of slurm.conf, for a while."""
        before = self.conf.read_text()
        self.conf.write_text(before + "".join(f"{line}\n" for line in lines))
        self.run("scontrol", "reconfigure")
        try:
            yield
        finally:
            self.conf.write_text(before)
            self.run("scontrol", "reconfigure")

    # -- the nodes -----------------------------------------------------------------------------------------------

    def enter(self, node: str) -> list[str]:
        """The words that, put before a command, run it inside a node."""
        return self._network.hosts[node].enter()

    def node_exec(self, node: str, *command: str, timeout: float = 60, check: bool = True) -> str:
        """Run a command inside a node and return its standard output."""
        return sh(*self.enter(node), *command, timeout=timeout, check=check)

    def node_spawn(self, node: str, *command: str) -> None:
        """Start a program inside a node that runs on; it ends with the node."""
        self._network.hosts[node].spawn(command, log=self.folder / f"{node}.out", env=self.env)

    def processes(self, node: str, pattern: str = "") -> list[Process]:
        """The processes of a node whose command line holds the regular expression."""
        return [p for p in self._network.hosts[node].processes() if re.search(pattern, p.line)]

    def ranks(self, node: str) -> dict[int, Process]:
        """The training processes of a node by their global rank; their DataLoader workers are not among them."""
        found: dict[int, Process] = {}
        for process in sorted(self.processes(node), key=lambda p: p.pid):
            env = process.environment()
            if "RANK" in env and "TORCHELASTIC_RUN_ID" in env:
                found.setdefault(int(env["RANK"]), process)
        return found

    def agents(self, node: str) -> list[Process]:
        """The torchrun agents of a node."""
        return self.processes(node, r"-m cluster_ddp\.launch\.torchrun")

    def kill(self, process: Process, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of a node; it may be gone already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)

    def link_down(self, node: str) -> None:
        """Pull the node's network cable."""
        self._network.hosts[node].link("down")

    def link_up(self, node: str) -> None:
        self._network.hosts[node].link("up")

    def cut_from_controller(self, node: str) -> None:
        """Let nothing of the node reach the controller any more; the storage and the other nodes it does reach."""
        self.node_exec(node, "ip", "route", "add", "blackhole", self._controller.address)

    def kill_slurmd(self, node: str) -> None:
        """kill -9 of the node's slurmd; the jobs on the node live on."""
        for process in self._slurmds(node):
            self.kill(process)
        wait_until(lambda: not self._slurmds(node), 10, f"slurmd of {node} is gone")

    def _slurmds(self, node: str) -> list[Process]:
        return [p for p in self.processes(node) if Path(p.arguments[0]).name == "slurmd"]

    def start_slurmd(self, node: str, *, wait: bool = True) -> None:
        """Start the node's slurmd, and wait until the controller knows."""
        command = [program("slurmd"), "-D", "-N", node, "-f", str(self.conf)]
        self._network.hosts[node].spawn(command, log=self.folder / f"slurmd-{node}.out", env=self.env)
        if wait:
            self.wait_for(lambda: self.node_state(node) in {"IDLE", "MIXED", "ALLOCATED"}, 180, f"{node} is back")

    def node_state(self, node: str) -> str:
        """IDLE, ALLOCATED, DOWN, ...: the state without its flags; a trailing * means no answer."""
        text = self.run("scontrol", "show", "node", "-o", node)
        match = re.search(r"\bState=([A-Z]+\*?)", text)
        return match[1] if match else ""

    def crash_node(self, node: str) -> None:
        """Cut the node's power: everything in it ends at once."""
        self._network.hosts[node].stop()

    def power_on(self, node: str) -> None:
        """Switch the node on, without its slurmd. Call it from the main thread, with whose end a node ends."""
        self._network.hosts[node].start()

    def boot_node(self, node: str) -> None:
        """Switch the node on again, as `power_on` does, and have its slurmd back."""
        self.power_on(node)
        self.start_slurmd(node)

    def reset(self) -> None:
        """Between tests: no job left, all links up, all nodes idle. Raises when the cluster cannot be mended."""
        if not self._slurmctlds():
            self.start_slurmctld()
            self.wait_for(lambda: self.call("scontrol", "ping").returncode == 0, 60, "the controller answers")
        if jobs := self.queue():
            self.run("scancel", *map(str, jobs))
            self.run("scancel", "--signal=KILL", "--full", *map(str, jobs), check=False)
        mended = False
        for node in self.nodes:
            host = self._network.hosts[node]
            if not host.running:
                host.start()
            host.link("up")
            self.node_exec(node, "ip", "route", "flush", "type", "blackhole")
            if not self._slurmds(node):
                self.start_slurmd(node, wait=False)
                mended = True
        self.wait_for(lambda: not self.queue(), 60, "no job is left")
        if not self._all_idle():
            self.run("scontrol", "update", f"NodeName={','.join(self.nodes)}", "State=RESUME", check=False)
            mended = True
        self.wait_for(self._all_idle, 60, "all nodes are idle")
        if mended:  # a cable that was plugged in a moment ago may not carry the next test's first messages
            step = ("srun", "--partition=debug", f"--nodes={len(self.nodes)}", "true")
            self.wait_for(lambda: self.call(*step).returncode == 0, 60, "a step runs on all nodes")
            self.wait_for(self._all_idle, 60, "all nodes are idle again")


def _installed_from_here() -> bool:
    """Whether the running Python imports this checkout wherever it is started: ``pip install -e`` has been here."""
    try:
        origin = importlib.metadata.distribution("cluster_ddp").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return origin is not None and json.loads(origin)["url"] == CHECKOUT.as_uri()
