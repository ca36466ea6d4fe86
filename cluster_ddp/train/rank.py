"""What a process does once to be a rank of a run: signals, stack dumps, the board, not outliving its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import IO

from cluster_ddp.network import resolve
from cluster_ddp.run.board import STACKS_SIGNAL, Board, Phase, Slot
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.spec import JobSpec
from cluster_ddp.train.distributed import World, setup_distributed
from cluster_ddp.train.stop import StopSignals

_PR_SET_PDEATHSIG = 1


class Beat:
    """Says on the board what this rank is doing; without a board it says nothing."""

    def __init__(self, slot: Slot | None = None) -> None:
        self._slot = slot
        self.phase = Phase.STARTING

    def enter(self, phase: Phase) -> None:
        """Say what comes now."""
        self.phase = phase
        if self._slot is not None:
            self._slot.set_phase(phase)

    def step(self, step: int) -> None:
        """Say that so many steps are finished."""
        if self._slot is not None:
            self._slot.beat(step)


@dataclass(frozen=True)
class RankProcess:
    """What the set-up of this process left behind; by default no signals and no board."""

    stop: StopSignals = field(default_factory=StopSignals)
    beat: Beat = field(default_factory=Beat)
    stacks: IO[str] | None = None


def become_rank(world: World, attempt: AttemptDirectory | None, warning_signal: str) -> RankProcess:
    """Set this process up as a rank.

    Parameters
    ----------
    world
        Who it is.
    attempt
        Where stacks are written when the node program asks for them; None: nowhere.
    warning_signal
        Name of the signal that announces the time limit, such as USR1.
    """
    _die_with_parent()
    board = _open_board()
    stop = StopSignals(board)
    stop.install(warning_signal)
    slot = None
    if board is not None and world.local_rank < len(board.slots):
        slot = board.slots[world.local_rank]
        slot.claim(rank=world.rank)
    return RankProcess(stop, Beat(slot), _register_stacks(world, attempt))


def join_ranks(job: JobSpec) -> None:
    """Join the other ranks with the backend and the timeout that the job asks for."""
    backend = None if job.network.backend == "auto" else job.network.backend
    setup_distributed(backend, timeout=resolve(job.network).timeout)


def _die_with_parent() -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _open_board() -> Board | None:
    path = os.environ.get("CLUSTER_DDP_BOARD")
    if not path:
        return None
    try:
        return Board.open(path)
    except (OSError, ValueError) as error:
        print(f"cluster_ddp: no board, stop requests come by signals only: {error}", file=sys.stderr, flush=True)
        return None


def _register_stacks(world: World, attempt: AttemptDirectory | None) -> IO[str] | None:
    if attempt is None or not hasattr(faulthandler, "register"):
        return None
    try:
        file = (attempt.path / f"stacks-rank{world.rank}.txt").open("a")
    except OSError:
        return None
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    return file
