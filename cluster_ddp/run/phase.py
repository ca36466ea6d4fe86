"""What a rank is doing: a number in its heartbeat, a word in events."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """What a rank is doing, by its heartbeat."""

    STARTING = 0
    READY = 1
    TRAINING = 2
    EVALUATING = 3
    SAVING = 4
    STOPPING = 5
    DONE = 6

    @property
    def word(self) -> str:
        """The phase as events and messages name it."""
        return self.name.lower()
