"""Hosts that live in Linux namespaces of this machine, joined by a bridge.

Each host has its own network (an address on ``eth0``), host name, process numbers, /etc/hosts and /dev/shm, so to the
programs inside it is a machine of its own. Nothing outside changes except one bridge: the host's mounts and names are
private to its namespaces, and all of it is gone when the host's first process is.

A test session that is killed takes its hosts with it (each is tied to its parent by a death signal). What can stay
behind then is the bridge and the folder; both carry the session's process id in their name, so that the next session
finds and removes them: `remove_leftovers`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "cddp"
OWNED_NAME = re.compile(rf"{PREFIX}(\d+)-\d+")
FIRST_PROCESS = Path(__file__).with_name("first_process.py")


def sh(*command: str, timeout: float = 30, check: bool = True) -> str:
    """Run a command and return its standard output; its standard error is in the exception."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} gave {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def wait_until(ready: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll the callable `ready` until it is true; TimeoutError with `what` otherwise."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(0.05)


@dataclass(frozen=True)
class Process:
    """One process of a host, with its number as this machine sees it."""

    pid: int
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        return " ".join(self.arguments)

    def environment(self) -> dict[str, str]:
        """What the process was started with; empty when it is gone."""
        with contextlib.suppress(OSError):
            pairs = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace").split("\0")
            return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return {}


def processes_in(pid_namespace: str) -> Iterator[Process]:
    """All live processes of a namespace, named as in /proc/PID/ns/pid; zombies and kernel threads are left out."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if str((entry / "ns" / "pid").readlink()) != pid_namespace:
                continue
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if arguments:
            yield Process(int(entry.name), tuple(arguments))


@dataclass
class Host:
    """A host of the network. `start` it before use; `stop` ends every process in it, as a power cut would."""

    name: str
    address: str
    cable: str  # this machine's end of the host's network cable
    network: Network
    _keeper: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _first: int = 0
    pid_namespace: str = ""

    @property
    def run_folder(self) -> Path:
        """What the host has as /run."""
        return self.network.folder / f"run-{self.name}"

    @property
    def running(self) -> bool:
        return self._keeper is not None

    def start(self) -> None:
        """Make the namespaces, the host's first process, and the cable."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--pid", "--mount-proc"]
        command += ["--net", "--uts", "--mount", "--ipc", sys.executable, "-S", "-E", str(FIRST_PROCESS)]
        self.run_folder.mkdir(exist_ok=True)
        command += [self.name, str(self.network.hosts_file), str(self.run_folder)]
        self._keeper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {self.name} did not come up: its first process ended")
        keeper = self._keeper.pid
        self._first = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])
        self.pid_namespace = str(Path(f"/proc/{self._first}/ns/pid").readlink())
        width = self.network.subnet.prefixlen
        # Switched on again, it has the hardware address that the others still have in their tables, as a machine would.
        peer = ("name", "eth0", "address", hardware_address(self.address), "netns", str(self._first))
        sh("ip", "link", "add", self.cable, "type", "veth", "peer", *peer)
        sh("ip", "link", "set", self.cable, "master", self.network.name, "up")
        enter = self.enter()
        sh(*enter, "ip", "address", "add", f"{self.address}/{width}", "dev", "eth0")
        sh(*enter, "ip", "link", "set", "eth0", "up")

    def enter(self) -> list[str]:
        """The command line prefix that runs a program inside this host."""
        return ["nsenter", "--target", str(self._first), "--net", "--uts", "--mount", "--pid", "--ipc", "--"]

    def spawn(self, command: Sequence[str], *, log: Path, env: dict[str, str] | None = None) -> None:
        """Start a program of the host that outlives this call; it ends with the host."""
        with log.open("ab") as out:
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.enter(), *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True,
            )  # fmt: skip

    def processes(self) -> list[Process]:
        return list(processes_in(self.pid_namespace)) if self.pid_namespace else []

    def kill_all(self) -> None:
        """Kill every process but the first at once: whoever held the host has lost it."""
        for process in self.processes():
            if process.pid != self._first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def link(self, state: str) -> None:
        """Plug ("up") or pull ("down") the network cable."""
        sh("ip", "link", "set", self.cable, state)

    def stop(self) -> None:
        """End the host and all its processes at once."""
        if self._keeper is None:
            return
        self._keeper.kill()
        self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        self._keeper = None
        namespace, self.pid_namespace, self._first = self.pid_namespace, "", 0
        if namespace:
            wait_until(lambda: not any(processes_in(namespace)), 20, f"the processes of host {self.name} are gone")
        sh("ip", "link", "delete", self.cable, check=False)


class Network:
    """A bridge of this machine with an address for the machine itself, and the hosts on it.

    Parameters
    ----------
    names:
        The hosts' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.name = ""
        self.folder = Path()
        self.subnet = ipaddress.IPv4Network("127.0.0.0/24")
        self._names = tuple(names)
        self.hosts: dict[str, Host] = {}

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts"

    def start(self) -> None:
        """Bring up the bridge and every host; on any failure, what was made is taken down again."""
        remove_leftovers()
        try:
            self._make_folder()
            self._make_bridge()
            self._write_hosts()
            for host in self.hosts.values():
                host.start()
        except BaseException:
            self.stop()
            raise

    def _make_folder(self) -> None:
        for number in range(100):
            name = f"{PREFIX}{os.getpid()}-{number}"
            folder = Path(tempfile.gettempdir()) / name
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o755)
                self.name, self.folder = name, folder
                return
        raise RuntimeError(f"100 folders {PREFIX}{os.getpid()}-* exist in {tempfile.gettempdir()}")

    def _make_bridge(self) -> None:
        sh("ip", "link", "add", "name", self.name, "type", "bridge")
        self.subnet = free_subnet(os.getpid())
        address = str(self.subnet[254])
        # Unless it is set, a bridge's hardware address follows those of the hosts that come and go.
        sh("ip", "link", "set", self.name, "address", hardware_address(address))
        sh("ip", "address", "add", f"{address}/{self.subnet.prefixlen}", "dev", self.name)
        sh("ip", "link", "set", self.name, "up")

    def _write_hosts(self) -> None:
        for number, name in enumerate(self._names, start=1):
            # At most 15 characters, as the kernel asks, and not to be taken for a bridge's name.
            cable = f"{self.name}{chr(ord('a') + number)}"
            self.hosts[name] = Host(name, str(self.subnet[number]), cable, self)
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{h.address} {h.name}" for h in self.hosts.values())]
        self.hosts_file.write_text("\n".join(lines) + "\n")

    def stop(self) -> None:
        """Take everything down; goes on to the end whatever fails, and raises the first failure then."""
        with contextlib.ExitStack() as steps:
            if self.name:
                steps.callback(remove_session, self.name)
            for host in self.hosts.values():
                steps.callback(host.stop)
        self.hosts, self.name = {}, ""


def hardware_address(address: str) -> str:
    """A locally administered Ethernet address that only depends on the IPv4 address."""
    return "02:00:" + ipaddress.IPv4Address(address).packed.hex(":")


def free_subnet(seed: int) -> ipaddress.IPv4Network:
    """A /24 of 10.100.0.0 to 10.199.255.0 that no interface and no route of this machine touches."""
    text = sh("ip", "-o", "-4", "address") + sh("ip", "-4", "route")
    taken = [ipaddress.ip_interface(t).network for t in re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?\b", text)]
    for attempt in range(1000):
        number = (seed * 7919 + attempt) % 25600
        subnet = ipaddress.IPv4Network(f"10.{100 + number // 256}.{number % 256}.0/24")
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise RuntimeError("no free /24 in 10.100.0.0 - 10.199.255.0")


def bridges() -> list[str]:
    """The bridges of all sessions on this machine, dead ones included."""
    return [n for n in os.listdir("/sys/class/net") if OWNED_NAME.fullmatch(n)]


def folders() -> list[Path]:
    """The folders of all sessions on this machine, dead ones included."""
    return [p for p in Path(tempfile.gettempdir()).iterdir() if OWNED_NAME.fullmatch(p.name)]


def remove_session(name: str) -> None:
    """Remove the bridge, the cables and the folder of a session."""

    def left() -> list[str]:
        return [n for n in os.listdir("/sys/class/net") if re.fullmatch(rf"{name}[a-z]?", n)]

    for interface in left():
        sh("ip", "link", "delete", interface, check=False)
    wait_until(lambda: not left(), 20, f"the interfaces of {name} are gone")
    shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)


def remove_leftovers() -> list[str]:
    """Clean up after sessions that were killed; returns their names. Those of live sessions are not touched."""
    removed = []
    for name in sorted({*bridges(), *(p.name for p in folders())}):
        match = OWNED_NAME.fullmatch(name)
        assert match is not None
        if not Path("/proc", match[1]).exists():
            for entry in keepers(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry, signal.SIGKILL)
            remove_session(name)
            removed.append(name)
    return removed


def keepers(name: str) -> list[int]:
    """Processes that still hold hosts of session `name` (a parent's death should have ended them)."""
    found = []
    needle = f"/{name}/hosts".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and needle in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
