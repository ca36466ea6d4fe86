"""Stopping: signals and the heartbeat file set a flag, and all ranks act on it after the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.processes import existing_signals, handle_here
from cluster_ddp.run import stopfile
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.ranks.distributed import host_group

SAVE_AND_END = stopfile.SAVE_AND_END
AT_ONCE = stopfile.AT_ONCE

_REASONS = {signal.SIGINT: stopfile.PERSON, signal.SIGTERM: stopfile.TERMINATED}
_REASONS_BY_CODE: tuple[str | None, ...] = (None, *stopfile.REASONS)
_REASON_CODES = {reason: code for code, reason in enumerate(_REASONS_BY_CODE)}
# One signal may reach a rank in several ways at nearly the same time; only a later one counts as a second signal.
_SECOND_SIGNAL_AFTER = 1.0
# A step that takes much longer than those before it must not postpone the next exchange too far.
_MAX_STEPS = 1000


_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


@contextlib.contextmanager
def handlers_put_back() -> Iterator[None]:
    """Restore the signal handlers after the block, for a notebook or an interpreter that continues."""
    before = {number: signal.getsignal(number) for number in existing_signals(*_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # A handler set by C code cannot be set again, and threads other than the main one cannot set any.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class StopSignals:
    """Whether this rank has been asked to stop, and why.

    It can be used alone: ``stop = StopSignals(); stop.install()``, then read ``stop.level`` in the loop.

    Parameters
    ----------
    heartbeat
        The node program's heartbeat, through which it can ask for a stop too; then only the node program can make it
        urgent.
    clock
        Returns seconds; used to distinguish a second signal from an echo of the first.
    """

    def __init__(self, heartbeat: HeartbeatFile | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._heartbeat = heartbeat
        self._clock = clock
        self._pid = os.getpid()
        self._level = 0
        self._reason: str | None = None
        self._first = 0.0
        self._installed: set[signal.Signals] = set()

    def install(self, *names: str) -> None:
        """Make SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and the named signals set the flag, and do nothing else.

        Raises
        ------
        TrainError
            This is not the main thread, the only one to which Python delivers signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise TrainError(
                "this is not the main thread of the program, and only that receives the signals that ask a run to "
                "stop: call join_run(), or StopSignals.install(), in the main thread"
            )
        self._installed = set(existing_signals(*_SIGNALS, *(f"SIG{name}" for name in names)))
        handle_here(self._installed, self._receive)

    @property
    def replaced_signals(self) -> list[str]:
        """The signals whose handler the program has replaced; none with a heartbeat, which also reports stops."""
        lost = {number for number in self._installed if signal.getsignal(number) != self._receive}
        return [] if self._heartbeat is not None else sorted(signal.Signals(number).name for number in lost)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that the program has forked inherits this handler
            return
        now = self._clock()
        if not self._level:
            self._level, self._first = SAVE_AND_END, now
            self._reason = _REASONS.get(signal.Signals(number), stopfile.TIME_LIMIT)
        elif self._heartbeat is None and now - self._first > _SECOND_SIGNAL_AFTER:
            self._level = AT_ONCE

    @property
    def level(self) -> int:
        """0: continue; 1: save and exit; 2: exit without waiting for anything else. Takes well under 1 us."""
        if self._heartbeat is None:
            return self._level
        return max(self._level, self._heartbeat.stop_level)

    @property
    def reason(self) -> str | None:
        """Why, one of `run.stopfile.REASONS`; None while no stop is requested."""
        return (self._heartbeat.stop_reason if self._heartbeat else None) or self._reason


@dataclass(frozen=True)
class StopDecision:
    """What all ranks agree on: the highest stop level and its reason, and whether rank 0 wants a checkpoint.

    `synced` is whether they exchanged this after the current step; between exchanges they simply continue.
    """

    level: int = 0
    reason: str | None = None
    save: bool = False
    synced: bool = False

    @property
    def stops(self) -> bool:
        """Whether training stops, however urgently."""
        return self.level > 0


_NOTHING = StopDecision()


class StopConsensus:
    """Makes all ranks take the same decision after the same step, at no measurable cost.

    About once a second, at a step that all ranks derive from the last exchange, one small reduction is started before
    the step's computation and read after it, when it has long arrived.

    Parameters
    ----------
    stop
        This rank's stop request.
    wants_save
        Returns whether rank 0 wants a checkpoint; called on rank 0 only.
    rank, world_size
        Of this process. A single process checks in every step; once per interval, its decision is `synced`.
    interval
        Seconds between exchanges.
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
        """Call before the computation of a step; starts the exchange if it is due."""
        if self._alone or step < self._next:
            return
        now = time.perf_counter()
        seconds = 0.0 if self._since is None else (now - self._since[1]) / max(1, step - self._since[0])
        self._since = (step, now)
        self._votes[0] = self._stop.level
        self._votes[1] = _REASON_CODES.get(self._stop.reason, 0)
        self._votes[2] = self._main and self._wants_save()
        self._votes[3] = seconds
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, host_group(), async_op=True)

    def end(self, step: int) -> StopDecision:
        """Call after the computation of that step; the result is the same on all ranks."""
        if self._alone:
            return self._decide_alone()
        if self._work is None:
            return _NOTHING
        self._work.wait()
        self._work = None
        level, reason, save, seconds = self._votes.tolist()
        steps = min(_MAX_STEPS, int(self._interval / seconds)) if seconds else 1  # the first exchange has no timing
        self._next = step + max(1, steps)
        return StopDecision(int(level), _REASONS_BY_CODE[int(reason)], bool(save), synced=True)

    def _decide_alone(self) -> StopDecision:
        level, save, now = self._stop.level, self._wants_save(), time.perf_counter()
        synced = now >= self._next_time
        if synced:
            self._next_time = now + self._interval
        return StopDecision(level, self._stop.reason, save, synced) if level or save or synced else _NOTHING
