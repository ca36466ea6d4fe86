"""The hang watchdog: notices that no step finishes any more.

A distributed job that hangs looks busy: every rank waits in a collective for one that does not come. What tells is that
ranks on the board give no sign of life. How long to wait is set (``launch.hang_timeout``) or learned from what the
steps took until now.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cluster_ddp.run.board import Phase, Slot

SHORTEST_LEARNED = 60.0  # seconds; a learned timeout is never shorter
UNLEARNED = 1800.0  # seconds: until enough steps were seen, and where no steps are made (evaluating, saving)
_STEPS_TO_LEARN_FROM = 20
_TIMES_MEDIAN = 30.0
_TIMES_LONGEST = 5.0
_REMEMBERED = 1000

_WATCHED = (Phase.TRAINING, Phase.EVALUATING, Phase.SAVING, Phase.STOPPING)


@dataclass(frozen=True)
class Hang:
    """A rank that has given no sign of life for longer than the timeout, seconds."""

    rank: int
    step: int
    phase: Phase
    silent: float
    timeout: float


class _Seen(NamedTuple):
    step: int
    beat: int  # ns
    silent: float


class Watchdog:
    """Watches the slots of one node.

    Parameters
    ----------
    hang_timeout
        Seconds, or ``auto``: 30 times the median, but at least 5 times the longest, of the pauses between steps, and
        never less than a minute.
    """

    def __init__(self, hang_timeout: float | Literal["auto"]) -> None:
        self._set = None if hang_timeout == "auto" else float(hang_timeout)
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: dict[int, _Seen] = {}

    def look(self, slots: Iterable[Slot], now_ns: int) -> Hang | None:
        """Learn from the signs of life since the last look, and say which rank hangs, the longest silent if several.

        Parameters
        ----------
        slots
            Of the ranks that are alive.
        now_ns
            `time.monotonic_ns()`.
        """
        hangs = [hang for slot in slots if (hang := self._look_at(slot, now_ns))]
        return max(hangs, key=lambda hang: hang.silent, default=None)

    def timeout(self, phase: Phase) -> float:
        """Seconds without a sign of life that count as a hang."""
        if self._set is not None:
            return self._set
        if phase is not Phase.TRAINING or len(self._pauses) < _STEPS_TO_LEARN_FROM:
            return UNLEARNED
        learned = max(_TIMES_MEDIAN * statistics.median(self._pauses), _TIMES_LONGEST * max(self._pauses))
        return max(SHORTEST_LEARNED, learned)

    def _look_at(self, slot: Slot, now_ns: int) -> Hang | None:
        pid, phase, step, beat = slot.pid, slot.phase, slot.step, slot.beat_ns
        silent = (now_ns - beat) / 1e9
        if phase is Phase.TRAINING:
            self._learn(pid, _Seen(step, beat, silent))
        else:
            self._last.pop(pid, None)
        if phase not in _WATCHED:
            return None
        timeout = self.timeout(phase)
        return Hang(slot.rank, step, phase, silent, timeout) if silent > timeout else None

    def _learn(self, pid: int, now: _Seen) -> None:
        """Of several steps since the last look, their mean is known, and how long the first had taken by then."""
        before = self._last.get(pid)
        if before is not None and now.step > before.step:
            mean = (now.beat - before.beat) / 1e9 / (now.step - before.step)
            self._pauses.append(max(mean, before.silent))
        self._last[pid] = now
