"""The stop requests of one node: where they come from, how they combine, and how long they wait.

They come by signal, from the attempt's stop file, or from the node program. Each but a hang is passed to the ranks
through the heartbeat; the level only rises. A second signal, or a grace too short for anything else, means: save
immediately.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.processes import ASK_TO_END, existing_signals
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import STOP_REQUESTED, EventWriter
from cluster_ddp.run.stopfile import (
    AT_ONCE,
    FINAL_REASONS,
    HANG,
    PERSON,
    SAVE_AND_END,
    TERMINATED,
    TIME_LIMIT,
    StopRequest,
    read_stop,
    request_stop,
)

SHORT_GRACE_SECONDS = 15.0
_FILE_POLL_SECONDS = 0.5
# Slurm may repeat a signal for a single event: to the step, and to srun, which passes it on.
_SAME_EVENT_SECONDS = 2.0


class Stopping:
    """Everything that asks this node to stop.

    Parameters
    ----------
    share
        Whether a signal to this node leaves a stop file for the other nodes: if no batch script does that.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        heartbeat: HeartbeatFile,
        events: EventWriter,
        *,
        node_rank: int,
        warning: signal.Signals,
        share: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._attempt = attempt
        self._heartbeat = heartbeat
        self._events = events
        self._node_rank = node_rank
        self._share = share
        self.warning = warning
        self._signals: list[tuple[signal.Signals, float]] = []
        self._last_signal: tuple[signal.Signals, float] | None = None
        self._next_file_poll = 0.0
        self._read: StopRequest | None = None
        self._reasons = {
            **dict.fromkeys((signal.SIGTERM, *ASK_TO_END), TERMINATED),
            **dict.fromkeys((*existing_signals("SIGUSR1", "SIGUSR2"), warning), TIME_LIMIT),
            signal.SIGINT: PERSON,
        }
        self._by = f"node {node_rank} ({host_name()})"
        self.reason: str | None = None
        self.level = 0
        self.since: float | None = None
        self.deadline: float | None = None

    def listen(self) -> None:
        """Handle signals from now on. The handlers only note them; `poll` acts."""
        for number in self._reasons:
            signal.signal(number, lambda given, _frame: self._signals.append((signal.Signals(given), self._clock())))

    def poll(self) -> None:
        """Act on signals and on the stop file, which is read twice a second."""
        arrived, self._signals = self._signals, []
        # Of signals that arrived together, the informative ones go first: SIGTERM may overtake the warning it follows.
        for number, moment in sorted(arrived, key=lambda arrival: self._reasons[arrival[0]] == TERMINATED):
            self._signalled(number, moment)
        now = self._clock()
        if now >= self._next_file_poll:
            self._next_file_poll = now + _FILE_POLL_SECONDS
            self._poll_file()

    def ask(self, reason: str, *, grace: float | None = None, step: int | None = None) -> None:
        """Stop the whole attempt, for a reason that the node program has found itself."""
        self._take(self._write_file(StopRequest(reason, SAVE_AND_END, grace, self._by)), step=step)

    def tell_others(self) -> None:
        """Pass the request on to the other nodes, unless somebody has: a signal may have reached only this node."""
        if self.reason is not None and read_stop(self._attempt) is None:
            self._write_file(StopRequest(self.reason, self.level, None, self._by))

    def end_within(self, seconds: float) -> None:
        """Have what is left in `seconds` from now killed; an earlier deadline stays."""
        deadline = self._clock() + seconds
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    @property
    def signalled_at(self) -> float | None:
        """When this process last received a signal, in monotonic time; None if it has not."""
        last = self._signals[-1] if self._signals else self._last_signal
        return None if last is None else last[1]

    @property
    def overdue(self) -> bool:
        """Whether the time that ranks have to end is over."""
        return self.deadline is not None and self._clock() > self.deadline

    def waited(self) -> float:
        """Return the seconds since the first request; 0 if there was none."""
        return 0.0 if self.since is None else self._clock() - self.since

    def _signalled(self, number: signal.Signals, moment: float) -> None:
        before, self._last_signal = self._last_signal, (number, moment)
        if before is not None and number is not signal.SIGINT and moment - before[1] < _SAME_EVENT_SECONDS:
            return
        if self.level == AT_ONCE and before is not None:
            self.end_within(0.0)
            return
        level = SAVE_AND_END if before is None else AT_ONCE
        request = StopRequest(self._reasons[number], level, None, f"{number.name} to {self._by}")
        self._take(self._write_file(request) if self._share else request)

    def _write_file(self, request: StopRequest) -> StopRequest:
        try:
            return request_stop(
                self._attempt, reason=request.reason, level=request.level, grace=request.grace, by=request.by
            )
        except OSError:
            return request  # the storage is full or gone: at least this node stops

    def _poll_file(self) -> None:
        # Opening the folder makes an NFS client ask the server whether anything in it has changed; otherwise it may
        # cache for a minute that there was no such file. Listing the folder would do the same, at a cost that grows
        # with the nodes.
        try:
            os.close(os.open(self._attempt.path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError:
            return
        request = read_stop(self._attempt)
        if request is not None and request != self._read:
            self._read = request
            self._take(request)

    def _take(self, request: StopRequest, step: int | None = None) -> None:
        short = request.grace is not None and request.grace <= SHORT_GRACE_SECONDS
        level = max(self.level, AT_ONCE if short else request.level)
        reason = request.reason if self.reason is None or _outranks(request.reason, self.reason) else self.reason
        self.since = self._clock() if self.since is None else self.since
        if request.grace is not None:
            self.end_within(request.grace)
        if (level, reason) == (self.level, self.reason):
            return
        self.level, self.reason = level, reason
        if reason != HANG:  # ranks must not act on a hang before they have written their stacks: see `NodeProgram`
            self._heartbeat.post_stop(level, reason)
        self._events.write(
            STOP_REQUESTED,
            attempt=self._attempt.number,
            reason=reason,
            level=level,
            grace=request.grace,
            node=self._node_rank,
            by=request.by,
            step=step,
        )


def _outranks(new: str, old: str) -> bool:
    """Whether a request replaces another: a signal alone gives no reason, a later one may; a person's always wins."""
    return new != old and (old == TERMINATED or new in FINAL_REASONS) and old not in FINAL_REASONS
