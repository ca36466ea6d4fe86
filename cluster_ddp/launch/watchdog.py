"""The hang watchdog: notices that no step finishes any more.

A distributed job that hangs looks busy: every rank waits in a collective for one that does not come. What tells is that
ranks on the board give no sign of life. How long to wait is set (``launch.hang_timeout``) or learned from what the
steps took until now.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

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


class Watchdog:
    """Watches the slots of one node.

    Parameters
    ----------
    hang_timeout
        Seconds, or ``auto``: 30 times the median, but at least 5 times the longest, of the pauses between signs of
        life in training, and never less than a minute.
    """

    def __init__(self, hang_timeout: float | Literal["auto"]) -> None:
        self._set = None if hang_timeout == "auto" else float(hang_timeout)
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: dict[int, tuple[int, int]] = {}

    def look(self, slots: tuple[Slot, ...], now_ns: int) -> Hang | None:
        """Learn from the signs of life since the last look, and say which rank hangs, the longest silent if several.

        Parameters
        ----------
        now_ns
            `time.monotonic_ns()`.
        """
        hangs = [hang for index, slot in enumerate(slots) if (hang := self._look_at(index, slot, now_ns))]
        return max(hangs, key=lambda hang: hang.silent, default=None)

    def timeout(self, phase: Phase) -> float:
        """Seconds without a sign of life that count as a hang."""
        if self._set is not None:
            return self._set
        if phase is not Phase.TRAINING or len(self._pauses) < _STEPS_TO_LEARN_FROM:
            return UNLEARNED
        learned = max(_TIMES_MEDIAN * statistics.median(self._pauses), _TIMES_LONGEST * max(self._pauses))
        return max(SHORTEST_LEARNED, learned)

    def _look_at(self, index: int, slot: Slot, now_ns: int) -> Hang | None:
        pid, phase, step, beat = slot.pid, slot.phase, slot.step, slot.beat_ns
        if not pid or phase not in _WATCHED:
            self._last.pop(index, None)
            return None
        if phase is Phase.TRAINING:
            self._learn(index, step, beat)
        else:
            self._last.pop(index, None)
        silent = (now_ns - beat) / 1e9
        timeout = self.timeout(phase)
        return Hang(slot.rank, step, phase, silent, timeout) if silent > timeout else None

    def _learn(self, index: int, step: int, beat: int) -> None:
        """Several steps may have passed since the last look: the mean pause of those is what can be known."""
        before = self._last.get(index)
        if before is None or step < before[0]:
            self._last[index] = (step, beat)
        elif step > before[0]:
            self._pauses.append((beat - before[1]) / 1e9 / (step - before[0]))
            self._last[index] = (step, beat)
