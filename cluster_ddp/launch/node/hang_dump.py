"""Collects what a hung attempt leaves behind: the stacks of its ranks and NCCL's flight recorder."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.launch.environment import recorder_pipes
from cluster_ddp.launch.node.heartbeat import STACKS_SIGNALS, written_stacks
from cluster_ddp.launch.node.ranks import Rank
from cluster_ddp.launch.processes import catches, send
from cluster_ddp.run.directory import AttemptDirectory

_STACKS_SECONDS = 10.0  # at most; on a busy node a rank may not run for seconds
_LOOK_SECONDS = 0.5
_RECORDER_SECONDS = 5.0  # ranks read their pipe about once a second, and then write


class DumpRequest(NamedTuple):
    """The ranks that were asked for their stacks, and for their flight recorders."""

    stacks: list[Rank]
    recorders: list[Rank]


def request_dump(ranks: Iterable[Rank], heartbeat: Path) -> DumpRequest:
    """Ask ranks for their stacks and flight recorders. A rank writes its stacks before it sees any later request."""
    asked = [(rank, number) for rank in ranks for number in STACKS_SIGNALS if catches(rank.pid, number)]
    for rank, number in asked:
        send(rank.pid, number)
    return DumpRequest([rank for rank, _ in asked], [rank for rank in ranks if _ask_for_recorder(rank, heartbeat)])


def collect(request: DumpRequest, heartbeat: Path, attempt: AttemptDirectory) -> list[str]:
    """Give ranks time to write what they were asked for, and keep it; return what was requested."""
    if request.recorders:
        time.sleep(_RECORDER_SECONDS)
    _await_stacks(heartbeat, {rank.rank for rank in request.stacks})
    keep_stacks(heartbeat, attempt)
    requested = {"stacks": request.stacks, "flight recorder": request.recorders}
    return [f"{what} of rank {rank.rank}" for what, of in requested.items() for rank in of]


def _await_stacks(heartbeat: Path, ranks: set[int]) -> None:
    """Wait until these ranks have written their stacks, as far as their files are still there."""
    deadline = time.monotonic() + _STACKS_SECONDS
    files = [file for rank, file in written_stacks(heartbeat).items() if rank in ranks]
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            sizes = [file.stat().st_size for file in files]
            if all(sizes) and sizes == before:
                return
            before = sizes


def _ask_for_recorder(rank: Rank, heartbeat: Path) -> bool:
    """Ask the rank to write its flight recorder; return False if it has none (NCCL only)."""
    try:
        pipe = os.open(f"{recorder_pipes(heartbeat)}{rank.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.closing(os.fdopen(pipe, "wb")) as writer:
        writer.write(b"1\n")
    return True


def keep_stacks(heartbeat: Path, attempt: AttemptDirectory) -> None:
    """Move the stacks that ranks have written to the attempt, and remove the files of ranks that wrote none."""
    for rank, file in written_stacks(heartbeat).items():
        with contextlib.suppress(OSError):
            if file.stat().st_size:
                shutil.copyfile(file, attempt.stacks_file(rank))
            file.unlink()


def remove_pipes(heartbeat: Path) -> None:
    """Remove the pipes that ranks have left behind."""
    for pipe in heartbeat.parent.glob(f"{Path(recorder_pipes(heartbeat)).name}*.pipe"):
        with contextlib.suppress(OSError):
            pipe.unlink()
