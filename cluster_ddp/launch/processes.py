"""The processes of a node: which belong to an attempt, which are ranks, which are alive, and how to end them.

Every process below the agent has the path of the node's heartbeat file in its environment. That path is unique, so
scanning /proc for it finds them all: ranks that outlived their agent, and the workers that ranks started, by whatever
means.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cluster_ddp.launch.variables import HEARTBEAT_VARIABLE

KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process that does not handle it. Windows has few signals, but this package must be importable there."""

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_KILL_PAUSE_SECONDS = 0.05
_KILL_SECONDS = 5.0  # a process stuck in the kernel cannot be killed

Handler = Callable[[int, FrameType | None], None]
_handler_of_sigterm: Handler | None = None


def existing_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals with these names, such as SIGUSR1, that exist on this platform."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


ASK_TO_STOP = existing_signals("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What a terminal, a scheduler or a script sends to all processes of a training to ask it to stop.

Other schedulers and `timeout` announce an end with SIGUSR1 or SIGUSR2, as Slurm does to its jobs.
"""

ASK_TO_END = existing_signals(
    "SIGHUP", "SIGQUIT", "SIGABRT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGPWR", "SIGUSR1", "SIGUSR2"
)  # fmt: skip
"""What a person or a site may send besides SIGTERM and SIGINT, and what ends a program that does not handle it."""


def handle_here(numbers: Iterable[signal.Signals], handler: Handler) -> None:
    """Handle signals in this process alone: what it forks ends on SIGTERM, for which ``terminate()`` and pools wait.

    An inherited handler could not see to that: Python calls it only between its own instructions, so not in a process
    that is stuck in C code, as in OpenMP after a fork, and it forgets signals that arrive within a fork.
    """
    global _handler_of_sigterm
    _end_forked_processes_by_sigterm()
    for number in numbers:
        signal.signal(number, handler)
        if number is signal.SIGTERM:
            _handler_of_sigterm = handler


@functools.cache
def _end_forked_processes_by_sigterm() -> None:
    if not hasattr(os, "register_at_fork"):
        return
    mask = threading.local()

    def block() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def reset() -> None:
        if _handler_of_sigterm is not None and signal.getsignal(signal.SIGTERM) == _handler_of_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def survive(numbers: Iterable[signal.Signals]) -> None:
    """Survive signals by handling them: unlike ignored or blocked ones, those still end what this process starts.

    A program that is started while SIGTERM is ignored ignores it too, and who terminates it waits for it forever.
    """
    survived = tuple(numbers)
    handle_here(survived, do_nothing)
    if sys.platform != "win32":
        for number in survived:
            signal.siginterrupt(number, False)  # C++ code of torch may take an interrupted call for a failed one
        signal.pthread_sigmask(signal.SIG_UNBLOCK, survived)


def do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


@dataclass(frozen=True)
class Process:
    """A process marked with a heartbeat file."""

    pid: int
    # torchrun starts each rank in its own session; what a rank starts is in the rank's session
    leads_session: bool
    environment: dict[str, str]  # the environment it was started with


def marked_processes(heartbeat: Path) -> list[Process]:
    """Find all live processes that were started with the heartbeat in their environment; none without /proc."""
    mark = f"{HEARTBEAT_VARIABLE}={heartbeat}".encode()
    found = []
    for entry in _pids():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours to read
            raw = (_PROC / entry / "environ").read_bytes().split(b"\0")  # empty for a zombie
            if mark in raw:
                pid = int(entry)
                found.append(Process(pid, os.getsid(pid) == pid, _environment(raw)))
    return found


def _pids() -> list[str]:
    try:
        return [entry.name for entry in _PROC.iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()]
    except OSError:
        return []


def _environment(raw: list[bytes]) -> dict[str, str]:
    pairs = (line.decode(errors="replace").partition("=") for line in raw if line)
    return {name: value for name, _, value in pairs}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    if not (_PROC / "self").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return True
        return False
    return _state(pid) not in (b"Z", b"X", None)


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) has stopped a process, and nobody has continued it."""
    return _state(pid) == b"T"


def name_of(pid: int) -> str:
    """Return what the kernel calls a process, such as pt_data_worker; empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of a process have used so far; 0 if there is no such process."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _state(pid: int) -> bytes | None:
    """Return the state of a process as the kernel writes it; None if there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else None


def _stat(pid: int) -> list[bytes]:
    """Return what the kernel says of a process behind its name, beginning with its state; empty if there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has installed a handler for a signal."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; it does not matter if the process is already gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_all(heartbeat: Path, first: int | None = None, *, ranks: Collection[int] = ()) -> list[int]:
    """Kill every process of a heartbeat file, `first` (the agent) before the others; return the pids that are left.

    Parameters
    ----------
    ranks
        Processes of living ranks. All in their sessions are killed, too: a program that has written its title over its
        environment (setproctitle) no longer has the mark.
    """
    if first is not None:
        send(first, KILL)
    end = time.monotonic() + _KILL_SECONDS
    while left := {*(process.pid for process in marked_processes(heartbeat)), *_in_sessions(ranks)}:
        for pid in left:
            send(pid, KILL)
        if time.monotonic() > end:
            break
        time.sleep(_KILL_PAUSE_SECONDS)
    return sorted(left)


def _in_sessions(leaders: Collection[int]) -> list[int]:
    """Find all live processes in the sessions of these processes."""
    found = []
    for pid in map(int, _pids() if leaders else ()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getsid(pid) in leaders and is_alive(pid):
                found.append(pid)
    return found


def die_with_parent(parent: int | None = None, number: signal.Signals = KILL) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux; no effect elsewhere).

    Call it in the child. The kernel watches the thread that started the child, so start it from a thread that lives as
    long as the process.

    Parameters
    ----------
    parent
        Process id of the parent, if the child knows it: then the signal comes even if the parent has already ended.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the call above took effect
        os.kill(os.getpid(), number)
