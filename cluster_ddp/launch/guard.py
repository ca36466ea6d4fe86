"""``python -m cluster_ddp.launch.guard BOARD``: ends what is left when the node program dies without a word.

The guard is a child of the node program that waits at the other end of a pipe. When the node program ends in order it
says so; when the pipe closes without that, the node program was killed, and the guard ends its agent and ranks. Ranks
that stand on the board have had SIGTERM from the kernel when their agent died; they get a moment to save, shorter than
it takes to start the run again. Others are ended at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster_ddp.launch.processes import kill_all, marked_processes, send

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_IN_ORDER = b"done\n"
SAVE_SECONDS = 3.0


class Guard:
    """The node program's end of the pipe."""

    def __init__(self, board: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster_ddp.launch.guard", str(board)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def dismiss(self) -> None:
        """Nothing is left to guard."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(_IN_ORDER)


def _watch(board: Path) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    said = sys.stdin.buffer.read()  # returns when the node program has closed its end, or is gone
    if said != _IN_ORDER:
        _end(board)
        with contextlib.suppress(OSError):
            board.unlink()


def _end(board: Path) -> None:
    saving = _ranks_on(board)
    for process in marked_processes(board):
        if process.leads_session and process.pid not in saving and "RANK" in process.environment:
            _kill_session(process.pid, board)
    deadline = time.monotonic() + SAVE_SECONDS
    while marked_processes(board) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill_all(board)


def _ranks_on(board: Path) -> set[int]:
    from cluster_ddp.run.board import Board  # only now: a guard that is never needed should cost nothing

    with contextlib.suppress(OSError, ValueError):
        return {slot.pid for slot in Board.open(board).slots}
    return set()


def _kill_session(leader: int, board: Path) -> None:
    for process in marked_processes(board):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                send(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
