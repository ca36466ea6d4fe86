"""The hang watchdog: notices that steps no longer finish.

A distributed job that hangs looks busy: every rank waits in a collective for one that never arrives. But the ranks'
heartbeats stop. How long to wait is set (``launch.hang_timeout``) or learned from the durations of the steps so far. A
start-up is watched too, with a longer timeout; after a stop request it is shorter.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cluster_ddp.launch.node.heartbeat import RankSlot
from cluster_ddp.launch.node.ranks import Rank
from cluster_ddp.run.phase import Phase

SHORTEST_LEARNED = 60.0  # seconds; a learned timeout is never shorter
UNLEARNED = 1800.0  # seconds: until enough steps were seen, and in phases without steps (evaluating, saving)
START_MARGIN = 600.0  # seconds: what a start-up may take beyond the time that nodes wait for each other
# Seconds that a rank is waited for once all have been asked to stop, unless its steps are known to take longer.
STOPPING_WORK = 60.0
STOPPING_SAVE = 600.0  # the last checkpoint may be large and the storage slow
_STEPS_TO_LEARN_FROM = 20
_TIMES_MEDIAN = 30.0
_TIMES_LONGEST = 5.0
_REMEMBERED = 1000

_STARTING = (Phase.STARTING, Phase.READY)
_SAVING = (Phase.SAVING, Phase.STOPPING)


@dataclass(frozen=True)
class Hang:
    """A rank that has given no sign of life for longer than the timeout, in seconds."""

    rank: int
    step: int
    phase: Phase
    silent: float
    timeout: float

    def describe(self, host: str) -> str:
        """Describe the hang in one line for people."""
        when = f"after step {self.step}" if self.step >= 0 else "before the first step"
        return (
            f"rank {self.rank} on {host} hangs: no sign of life for {self.silent:.0f} s (timeout {self.timeout:.0f} s) "
            f"{when}, while {self.phase.word}"
        )


class _Seen(NamedTuple):
    step: int
    beat: int  # ns
    silent: float


class Watchdog:
    """Watches the slots of one node.

    Parameters
    ----------
    hang_timeout
        Seconds, or ``auto``: 30 times the median of the pauses between steps, but at least 5 times the longest, and
        never less than a minute.
    join_timeout
        Seconds that nodes wait for each other when they start. A start-up may download and read data, so its timeout is
        never short, whatever is set for steps.
    """

    def __init__(self, hang_timeout: float | Literal["auto"], join_timeout: float) -> None:
        self._set = None if hang_timeout == "auto" else float(hang_timeout)
        self._start = max(self._set or 0.0, join_timeout + START_MARGIN)
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: dict[int, _Seen] = {}
        self._stood_still = (0, 0)

    def forgive(self, since_ns: int, until_ns: int) -> None:
        """Exclude a time in which the watching process itself stood still, on the clock of `check`."""
        self._stood_still = (since_ns, until_ns)
        self._last.clear()  # no pause between steps is learned across it

    def check(self, slots: Iterable[RankSlot], now_ns: int, *, stopping_for: float | None = None) -> Hang | None:
        """Learn from the signs of life since the last call; return the rank that hangs, the longest silent if several.

        Parameters
        ----------
        stopping_for
            Seconds since all were asked to stop; None if they were not. A rank that does not stop then is given up
            sooner.
        """
        hangs = [hang for slot in slots if (hang := self._check(slot, now_ns, stopping_for))]
        return max(hangs, key=lambda hang: hang.silent, default=None)

    def check_unregistered(self, ranks: Iterable[Rank], now: float) -> Hang | None:
        """Return the rank that hangs before its first heartbeat, such as while importing modules from dead storage."""
        hangs = [Hang(rank.rank, -1, Phase.STARTING, now - rank.since, self._start) for rank in ranks]
        return next((hang for hang in hangs if hang.silent > hang.timeout), None)

    def timeout(self, phase: Phase) -> float:
        """Return the seconds without a sign of life that count as a hang."""
        if phase in _STARTING:
            return self._start
        if self._set is not None:
            return self._set
        if phase is not Phase.TRAINING or len(self._pauses) < _STEPS_TO_LEARN_FROM:
            return UNLEARNED
        learned = max(_TIMES_MEDIAN * statistics.median(self._pauses), _TIMES_LONGEST * max(self._pauses))
        return max(SHORTEST_LEARNED, learned)

    def patience(self, phase: Phase) -> float:
        """Return the seconds without a sign of life after which a rank that was asked to stop is given up."""
        if phase in _SAVING:
            return min(self.timeout(phase), STOPPING_SAVE)
        return min(self.timeout(phase), max(STOPPING_WORK, _TIMES_LONGEST * max(self._pauses, default=0.0)))

    def _check(self, slot: RankSlot, now_ns: int, stopping_for: float | None) -> Hang | None:
        pid, phase, step, beat = slot.pid, slot.phase, slot.step, slot.beat_ns
        since, until = self._stood_still
        silent = (now_ns - beat - (until - max(since, beat) if beat < until else 0)) / 1e9
        if phase is Phase.TRAINING:
            self._learn(pid, _Seen(step, beat, silent))
        else:
            self._last.pop(pid, None)
        if phase is Phase.DONE:
            return None
        timeout, waited = self.timeout(phase), silent
        if stopping_for is not None and silent <= timeout:
            timeout, waited = self.patience(phase), min(silent, stopping_for)
        return Hang(slot.rank, step, phase, silent, timeout) if waited > timeout else None

    def _learn(self, pid: int, now: _Seen) -> None:
        """Learn the mean pause of the steps since the last call, or how long the first has taken if that is longer."""
        before = self._last.get(pid)
        if before is not None and now.step > before.step:
            mean = (now.beat - before.beat) / 1e9 / (now.step - before.step)
            self._pauses.append(max(mean, before.silent))
        self._last[pid] = now
