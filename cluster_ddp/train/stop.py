"""Stopping: signals and the board raise a flag, and all ranks agree at which step they heed it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from cluster_ddp.run import stopfile
from cluster_ddp.run.board import Board

SAVE_AND_END = stopfile.SAVE_AND_END
AT_ONCE = stopfile.AT_ONCE

_REASONS = {signal.SIGINT: stopfile.PERSON, signal.SIGTERM: stopfile.TERMINATED}
_REASONS_BY_CODE: tuple[str | None, ...] = (None, *stopfile.REASONS)
_REASON_CODES = {reason: code for code, reason in enumerate(_REASONS_BY_CODE)}
# One signal may reach a rank by several ways at nearly the same time; only one that comes later is a second one.
_SECOND_SIGNAL_AFTER = 1.0
# A step that takes much longer than those before it must not push the next agreement far away.
_MOST_STEPS = 1000


class StopSignals:
    """The wish that training ends, as this rank knows it.

    Usable alone: ``stop = StopSignals(); stop.install()``, then look at ``stop.level`` in the loop.

    Parameters
    ----------
    board
        The node program's board, whose word counts too; then the node program alone decides that it is urgent.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._level = 0
        self._reason: str | None = None
        self._first = 0.0

    def install(self, *names: str) -> None:
        """Raise the flag, and do nothing else, on SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and the signals named."""
        for name in {"TERM", "INT", "USR1", "USR2", *names}:
            signal.signal(getattr(signal, f"SIG{name}"), self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._level:
            self._level, self._first = SAVE_AND_END, now
            self._reason = _REASONS.get(signal.Signals(number), stopfile.TIME_LIMIT)
        elif self._board is None and now - self._first > _SECOND_SIGNAL_AFTER:
            self._level = AT_ONCE

    @property
    def level(self) -> int:
        """0: go on; 1: save and end; 2: at once, waiting for nothing else. Well under 1 us."""
        if self._board is None:
            return self._level
        return max(self._level, self._board.stop_level)

    @property
    def reason(self) -> str | None:
        """Why, one of `run.stopfile.REASONS`; None as long as nothing asks to stop."""
        return (self._board.stop_reason if self._board else None) or self._reason


@dataclass(frozen=True)
class Agreed:
    """What all ranks know: the highest stop level and why, and whether rank 0 wants a checkpoint.

    `asked` says whether they have exchanged it after this step, or just go on.
    """

    level: int = 0
    reason: str | None = None
    save: bool = False
    asked: bool = False


_NOTHING = Agreed()


class Agreement:
    """Lets all ranks decide the same thing after the same step, at a cost that does not show.

    About once a second, at a step that all ranks derive alike from the last agreement, one small reduction is started
    before the step's computation and read after it, when it has long arrived.

    Parameters
    ----------
    stop
        This rank's wish.
    wants_save
        Says whether rank 0 wants a checkpoint; called on rank 0 only.
    rank, world_size
        Of this process. A single process asks itself in every step, and says so (`Agreed.asked`) in each interval.
    interval
        Seconds between agreements.
    """

    def __init__(
        self,
        stop: StopSignals,
        wants_save: Callable[[], bool],
        *,
        rank: int,
        world_size: int,
        interval: float = 1.0,
    ) -> None:
        self._stop = stop
        self._wants_save = wants_save
        self._main = rank == 0
        self._alone = world_size == 1
        self._interval = interval
        self._next = -1
        self._next_time = 0.0
        self._since: tuple[int, float] | None = None
        self._votes = torch.zeros(4, dtype=torch.float64)
        self._work: dist.Work | None = None

    def begin(self, step: int) -> None:
        """Call before the computation of a step; starts the exchange when it is due."""
        if self._alone or step < self._next:
            return
        now = time.perf_counter()
        seconds = 0.0 if self._since is None else (now - self._since[1]) / max(1, step - self._since[0])
        self._since = (step, now)
        self._votes[0] = self._stop.level
        self._votes[1] = _REASON_CODES.get(self._stop.reason, 0)
        self._votes[2] = self._main and self._wants_save()
        self._votes[3] = seconds
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, async_op=True)

    def end(self, step: int) -> Agreed:
        """Call after the computation of that step; what it returns is the same on all ranks."""
        if self._alone:
            return self._ask_myself()
        if self._work is None:
            return _NOTHING
        self._work.wait()
        self._work = None
        level, reason, save, seconds = self._votes.tolist()
        wait = _MOST_STEPS if seconds * _MOST_STEPS < self._interval else int(self._interval / seconds)
        self._next = step + (max(1, wait) if seconds else 1)
        return Agreed(int(level), _REASONS_BY_CODE[int(reason)], bool(save), asked=True)

    def _ask_myself(self) -> Agreed:
        level, save, now = self._stop.level, self._wants_save(), time.perf_counter()
        asked = now >= self._next_time
        if asked:
            self._next_time = now + self._interval
        return Agreed(level, self._stop.reason, save, asked) if level or save or asked else _NOTHING
