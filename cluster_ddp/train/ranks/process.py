"""Sets a process up as a rank of a run: signals, stack dumps, the heartbeat, and not outliving its parent."""

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

from cluster_ddp.errors import Cause
from cluster_ddp.job import JobSpec
from cluster_ddp.launch.node.heartbeat import STACKS_SIGNALS, HeartbeatFile, RankSlot, stacks_beside
from cluster_ddp.launch.processes import die_with_parent, is_alive
from cluster_ddp.launch.variables import HEARTBEAT_VARIABLE
from cluster_ddp.network import resolve
from cluster_ddp.printing import say
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.phase import Phase
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.ranks.distributed import World, setup_distributed
from cluster_ddp.train.ranks.stop import StopSignals


class Beat:
    """What this rank is doing, shown to the node program if there is a heartbeat file."""

    def __init__(self, slot: RankSlot | None = None) -> None:
        self._slot = slot
        self._pid = os.getpid()
        self.phase = Phase.STARTING
        self.steps = 0  # finished steps

    def enter(self, phase: Phase) -> None:
        """Enter a phase; counts as a heartbeat."""
        self._end_a_copy()
        self.phase = phase
        if self._slot is not None:
            self._slot.set_phase(phase)

    def step(self, steps: int) -> None:
        """Set the number of finished steps; counts as a heartbeat."""
        self._end_a_copy()
        self.steps = steps
        if self._slot is not None:
            self._slot.beat(steps)

    def fail(self, cause: Cause) -> None:
        """Report that this rank fails, and why."""
        self._end_a_copy()
        if self._slot is not None:
            self._slot.set_cause(cause)

    def _end_a_copy(self) -> None:
        """End this process if the program has forked it from the rank: both would write the same checkpoints."""
        if os.getpid() != self._pid:
            say(
                f"cluster-ddp: process {os.getpid()} ends here: the program has forked it (os.fork) from process "
                f"{self._pid}, a rank, and let it train on. Let such a process end with os._exit()"
            )
            os._exit(1)

    def expect_alone(self) -> None:
        """Check that no other process has become the same rank.

        Raises
        ------
        TrainError
            One has: it claimed the slot at the same time.
        """
        if self._slot is not None and self._slot.pid not in (0, os.getpid()):
            raise _second(self._slot)


@dataclass(frozen=True)
class RankProcess:
    """What the setup of this process created; by default, no signal handlers and no heartbeat file."""

    stop: StopSignals = field(default_factory=StopSignals)
    beat: Beat = field(default_factory=Beat)
    stacks: IO[str] | None = None  # faulthandler's output; must stay open as long as the process lives
    consensus_seconds: float = 1.0  # interval at which the ranks agree whether to stop


def become_rank(world: World, attempt: AttemptDirectory | None) -> RankProcess:
    """Set this process up as a rank; with an attempt and a heartbeat, it writes its stacks when asked to.

    It does so before anything else can fail, so that the rank can report why by its heartbeat. The job's own warning
    signal is not known yet: the caller passes it to `RankProcess.stop.install`.
    """
    die_with_parent(number=signal.SIGTERM)
    _fork_between_threads()
    heartbeat = _open_heartbeat()
    stop = StopSignals(heartbeat)
    stop.install()
    slot = None
    if heartbeat is not None and world.local_rank < len(heartbeat.slots):
        slot = heartbeat.slots[world.local_rank]
        if slot.pid not in (0, os.getpid(), os.getppid()) and is_alive(slot.pid):
            raise _second(slot)
        slot.claim(rank=world.rank)
    return RankProcess(stop, Beat(slot), _register_stacks(world, heartbeat if attempt else None))


def _second(slot: RankSlot) -> TrainError:
    return TrainError(
        f"process {slot.pid} is already rank {slot.rank} of this run, so both would write the same checkpoints: only "
        "one process of each rank may join the run. To train on several ranks, let cluster-ddp start them "
        "(launch.procs_per_node); processes that a program starts itself, as in Hogwild training, cannot join it"
    )


def join_ranks(job: JobSpec) -> None:
    """Join the other ranks with the backend and timeout of the job.

    A group that the program itself has created keeps its backend, but takes the timeout of the job file, if that has
    one.
    """
    backend = job.network.fixed_backend
    timeout = resolve(job.network, os.environ).timeout
    if dist.is_initialized() and job.network.timeout is not None:
        # Public since torch 2.14, in which the private one warns.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(datetime.timedelta(seconds=timeout))
    setup_distributed(backend, timeout=timeout)


@functools.cache
def _fork_between_threads() -> None:
    """Prevent a worker from being forked while a thread of Gloo or pyarrow registers with Python.

    Registering takes a lock; before 3.12 (3.11.10, 3.10.15), a worker forked meanwhile waits for it forever:
    python/cpython#112275. `sys._current_frames` takes the same lock, and so waits until no other thread holds it.
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
        say(
            f"cluster-ddp: cannot open the heartbeat file {path} ({error}): the node's hang watchdog does not see this "
            "rank, and only signals can ask it to stop"
        )
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
