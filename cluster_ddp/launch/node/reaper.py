"""``python -m cluster_ddp.launch.node.reaper HEARTBEAT ATTEMPT LOG FOLDER``: cleans up after a killed node program.

The reaper is a child of the node program and waits at the other end of a pipe. A node program that ends normally kills
it first; if the pipe closes, the node program was killed, and the reaper ends its agent and ranks. Ranks with a
heartbeat got SIGTERM from the kernel when their agent died; they get a moment to save, shorter than a restart of the
run takes. Others are ended immediately. What they printed last goes to the node's log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.launch.processes import ASK_TO_END, KILL, existing_signals, kill_all, marked_processes, send
from cluster_ddp.run.liveness import ProcessIdentity, identify, identity_name, is_alive, parse_identity

if TYPE_CHECKING:
    from cluster_ddp.launch.node.rank_output import RankOutput
    from cluster_ddp.run.directory import AttemptDirectory

_IGNORED = (*existing_signals("SIGTERM", "SIGINT"), *ASK_TO_END)
SAVE_SECONDS = 3.0


class Reaper:
    """The node program's end of the pipe."""

    def __init__(self, heartbeat: Path, attempt: AttemptDirectory, output: RankOutput) -> None:
        arguments = map(str, (heartbeat, attempt.path, output.log, output.folder))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster_ddp.launch.node.reaper", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

        self._known: set[int] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def note_ranks(self, ranks: Iterable[int]) -> None:
        """Tell the reaper which processes are ranks: those that set their titles (setproctitle) bear no mark."""
        for pid in ranks:
            if pid not in self._known:
                self._known.add(pid)
                self._say(identity_name(identify(pid)).encode() + b"\n")

    def dismiss(self) -> None:
        """End the reaper: there is nothing left for it to do. Somebody may have stopped it (SIGSTOP)."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.stdin.write(line)
            self._process.stdin.flush()


def _watch(heartbeat: Path, attempt: Path, log: Path, folder: Path) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    said = sys.stdin.buffer.read()  # returns when the node program is gone
    _end(heartbeat, list(map(parse_identity, said.decode(errors="replace").splitlines())))
    _rescue(heartbeat, attempt, log, folder)
    with contextlib.suppress(OSError):
        heartbeat.unlink()


def _end(heartbeat: Path, ranks: Iterable[ProcessIdentity | None]) -> None:
    saving = _ranks_on(heartbeat)
    for process in marked_processes(heartbeat):
        if process.leads_session and process.pid not in saving and "RANK" in process.environment:
            _kill_session(process.pid, heartbeat)
    deadline = time.monotonic() + SAVE_SECONDS
    while marked_processes(heartbeat) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill_all(heartbeat, ranks={rank.pid for rank in ranks if rank is not None and is_alive(rank)})


def _rescue(heartbeat: Path, attempt: Path, log: Path, folder: Path) -> None:
    """Save the output that the node program can no longer copy to shared storage."""
    from cluster_ddp.launch.node import hang_dump
    from cluster_ddp.launch.node.rank_output import RankOutput
    from cluster_ddp.process import limit_umask
    from cluster_ddp.run.directory import AttemptDirectory

    limit_umask(AttemptDirectory(attempt).run.path)
    hang_dump.remove_pipes(heartbeat)
    hang_dump.keep_stacks(heartbeat, AttemptDirectory(attempt))
    output = RankOutput(log, folder)
    for _ in output.rest():
        pass
    output.remove()


def _ranks_on(heartbeat: Path) -> set[int]:
    # Imported only now: a reaper that is never needed should cost nothing.
    from cluster_ddp.launch.node.heartbeat import (
        HeartbeatFile,
    )

    with contextlib.suppress(OSError, ValueError):
        return {slot.pid for slot in HeartbeatFile.open(heartbeat).slots}
    return set()


def _kill_session(leader: int, heartbeat: Path) -> None:
    for process in marked_processes(heartbeat):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                send(process.pid, KILL)


if __name__ == "__main__":
    _watch(*map(Path, sys.argv[1:]))
