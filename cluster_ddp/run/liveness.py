"""Whether a process that was recorded some time ago, perhaps on a different machine, still exists.

A process id alone says little: ids are reused, machines restart, containers number their own processes. So the machine
(by its boot), the id's namespace and the start time of the process are recorded with it.
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
_CLAIM_SECONDS = 300.0  # after which the claim of an unreachable host expires


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process for all time: no other process ever has the same values."""

    host: str
    pid: int
    boot_id: str  # identifies this boot of this machine; empty if the system has no boot ids
    namespace: str  # of process ids; empty if the system has none
    started: str  # start time of the process, in the system's own format; empty if there was no such process


def identify(pid: int, host: str | None = None) -> ProcessIdentity:
    """Return the identity of a process on this machine; `host` is the machine's name for people."""
    return ProcessIdentity(host or os.uname().nodename, pid, _boot_id(), _namespace(), _start_time(pid))


def identity_name(process: ProcessIdentity) -> str:
    """Encode a process as part of a file name, to be read back by `parse_identity`."""
    return "~".join((process.host, str(process.pid), process.namespace, process.started, process.boot_id))


def parse_identity(name: str) -> ProcessIdentity | None:
    """Decode a process from part of a file name; None if it is not one."""
    parts = name.split("~")
    if len(parts) != 5 or not parts[1].isdecimal():
        return None
    host, pid, namespace, started, boot_id = parts
    return ProcessIdentity(host=host, pid=int(pid), boot_id=boot_id, namespace=namespace, started=started)


def read_identity(value: dict[str, Any]) -> ProcessIdentity | None:
    """Read an identity from its JSON form; None if it is not one."""
    pid = value.get("pid")
    texts = [value.get(name) for name in ("host", "boot_id", "namespace", "started")]
    if not isinstance(pid, int) or not all(isinstance(text, str) for text in texts):
        return None
    host, boot_id, namespace, started = map(str, texts)
    return ProcessIdentity(host, pid, boot_id, namespace, started)


def is_alive(process: ProcessIdentity) -> bool | None:
    """Whether the process still exists; None if that cannot be determined from here."""
    if not process.started:
        return False
    if process.boot_id != _boot_id():
        same_machine = process.host == os.uname().nodename
        return False if same_machine else None  # this machine has restarted since, or it is a different one
    if process.namespace != _namespace():
        return None
    if not process.boot_id and process.host != os.uname().nodename:
        return None
    return _start_time(process.pid) == process.started


def claim() -> dict[str, Any]:
    """Return a claim, in JSON form, that this process is working on something from now on."""
    return {**asdict(identify(os.getpid())), "since": time.time()}


def is_claimed(claim: dict[str, Any] | None) -> bool:
    """Whether the process of a `claim` is still working; a claim from an unreachable host expires after minutes."""
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
    fields = stat.rpartition(")")[2].split()  # the name before it may contain spaces and brackets
    state, started = fields[0], fields[_START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME]
    return "" if state in "ZX" else started  # a zombie no longer does anything


def _start_time_by_ps(pid: int) -> str:
    """Return the start time on a system without /proc (macOS)."""
    import subprocess

    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, env=environment)
    return done.stdout.strip()
