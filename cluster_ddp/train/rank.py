"""What a process does once to be a rank of a run: signals, stack dumps, the heartbeat, not outliving its parent."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import IO

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.heartbeat import STACKS_SIGNALS, HeartbeatFile, RankSlot, stacks_beside
from cluster_ddp.launch.processes import die_with_parent
from cluster_ddp.launch.variables import HEARTBEAT_VARIABLE
from cluster_ddp.network import resolve
from cluster_ddp.printing import say
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.phase import Phase
from cluster_ddp.train.distributed import World, setup_distributed
from cluster_ddp.train.stop import StopSignals


class Beat:
    """What this rank is doing: known here, and shown to the node program where there is a heartbeat file."""

    def __init__(self, slot: RankSlot | None = None) -> None:
        self._slot = slot
        self.phase = Phase.STARTING
        self.steps = 0  # that are finished

    def enter(self, phase: Phase) -> None:
        """This is what comes now; counts as a sign of life."""
        self.phase = phase
        if self._slot is not None:
            self._slot.set_phase(phase)

    def step(self, steps: int) -> None:
        """So many steps are finished; counts as a sign of life."""
        self.steps = steps
        if self._slot is not None:
            self._slot.beat(steps)


@dataclass(frozen=True)
class RankProcess:
    """What the set-up of this process left behind; by default no signals and no heartbeat file."""

    stop: StopSignals = field(default_factory=StopSignals)
    beat: Beat = field(default_factory=Beat)
    stacks: IO[str] | None = None  # where faulthandler writes; open as long as the process lives
    consensus_seconds: float = 1.0  # how often the ranks exchange whether to stop


def become_rank(world: World, attempt: AttemptDirectory | None, warning_signal: str) -> RankProcess:
    """Set this process up as a rank; where there is an attempt and a heartbeat, it writes its stacks when asked to."""
    die_with_parent(number=signal.SIGTERM)
    _fork_between_threads()
    heartbeat = _open_heartbeat()
    stop = StopSignals(heartbeat)
    stop.install(warning_signal)
    slot = None
    if heartbeat is not None and world.local_rank < len(heartbeat.slots):
        slot = heartbeat.slots[world.local_rank]
        slot.claim(rank=world.rank)
    return RankProcess(stop, Beat(slot), _register_stacks(world, heartbeat if attempt else None))


def join_ranks(job: JobSpec) -> None:
    """Join the other ranks with the backend and the timeout that the job asks for.

    A group that the program has made itself keeps its backend, and takes the timeout where the job file has one.
    """
    backend = None if job.network.backend == "auto" else job.network.backend
    timeout = resolve(job.network, os.environ).timeout
    if dist.is_initialized() and job.network.timeout is not None:
        _set_pg_timeout(datetime.timedelta(seconds=timeout))  # private: nothing public changes it
    setup_distributed(backend, timeout=timeout)


@functools.cache
def _fork_between_threads() -> None:
    """Let no worker be forked in the moment in which a thread of Gloo's or pyarrow's makes itself known to Python.

    That takes a lock, and before 3.12 (3.11.10, 3.10.15) a worker that is forked meanwhile waits for it forever:
    python/cpython#112275. To tell of all threads Python takes the same lock: it waits until no other has it.
    """
    if sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=sys._current_frames)


def _open_heartbeat() -> HeartbeatFile | None:
    path = os.environ.get(HEARTBEAT_VARIABLE)
    if not path:
        return None
    try:
        return HeartbeatFile.open(path)
    except (OSError, ValueError) as error:
        say(f"cluster_ddp: no heartbeat file, stop requests come by signals only: {error}")
        return None


def _register_stacks(world: World, heartbeat: HeartbeatFile | None) -> IO[str] | None:
    if heartbeat is None or not STACKS_SIGNALS:
        return None
    try:
        file = stacks_beside(heartbeat.path, world.rank).open("a")
    except OSError:
        return None
    for number in STACKS_SIGNALS:
        faulthandler.register(number, file=file, all_threads=True, chain=False)
    return file
