"""Whether a process that was recorded some time ago, perhaps on another machine, still exists.

A process id alone says little: ids are reused, machines restart, containers number their own processes. So the machine
(by its boot), the id's namespace and the moment the process started are written down with it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.run.reading import as_time

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME_FIELD = 22  # of /proc/<pid>/stat, counted from 1: clock ticks since boot
_FIRST_FIELD_AFTER_NAME = 3
_CLAIM_SECONDS = 300.0  # after which one from a host that cannot be seen is considered dead


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, identified for all time: no other process ever has the same values."""

    host: str
    pid: int
    boot_id: str  # names this boot of this machine; empty where the system has no such thing
    namespace: str  # of process ids; empty where the system has none
    started: str  # when the process started, in the system's own form; empty when there was no such process


def identify(pid: int, host: str | None = None) -> ProcessIdentity:
    """The identity of a process on this machine; `host` is what people call the machine."""
    return ProcessIdentity(host or os.uname().nodename, pid, _boot_id(), _namespace(), _start_time(pid))


def identity_name(process: ProcessIdentity) -> str:
    """A process as a part of a file's name, which `parse_identity` reads back."""
    return "~".join((process.host, str(process.pid), process.namespace, process.started, process.boot_id))


def parse_identity(name: str) -> ProcessIdentity | None:
    """The process that a part of a file's name stands for; None when it stands for none."""
    parts = name.split("~")
    if len(parts) != 5 or not parts[1].isdecimal():
        return None
    host, pid, namespace, started, boot_id = parts
    return ProcessIdentity(host=host, pid=int(pid), boot_id=boot_id, namespace=namespace, started=started)


def read_identity(value: dict[str, Any]) -> ProcessIdentity | None:
    """An identity from its JSON form; None when it is not one."""
    pid = value.get("pid")
    texts = [value.get(name) for name in ("host", "boot_id", "namespace", "started")]
    if not isinstance(pid, int) or not all(isinstance(text, str) for text in texts):
        return None
    host, boot_id, namespace, started = map(str, texts)
    return ProcessIdentity(host, pid, boot_id, namespace, started)


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether the process still exists; None when that cannot be told from here."""
    if not process.started:
        return False
    if process.boot_id != _boot_id():
        same_machine = process.host == os.uname().nodename
        return False if same_machine else None  # this machine has restarted since, or it is another one
    if process.namespace != _namespace():
        return None
    if not process.boot_id and process.host != os.uname().nodename:
        return None
    return _start_time(process.pid) == process.started


def claim() -> dict[str, Any]:
    """This process as the one that works on something from now on, in JSON form."""
    return {**asdict(identify(os.getpid())), "since": time.time()}


def is_claimed(claim: dict[str, Any] | None) -> bool:
    """Whether the process of a `claim` is still working; on a host that cannot be seen, a claim lasts some minutes."""
    process = read_identity(claim or {})
    if claim is None or process is None:
        return False
    alive, since = is_alive(process), as_time(claim.get("since")) or 0.0
    return alive if alive is not None else time.time() - since < _CLAIM_SECONDS


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _start_time_by_ps(pid)
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    state, started = fields[0], fields[_START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME]
    return "" if state in "ZX" else started  # a zombie does nothing any more


def _start_time_by_ps(pid: int) -> str:
    """Where there is no /proc (macOS)."""
    import subprocess

    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, env=environment)
    return done.stdout.strip()
