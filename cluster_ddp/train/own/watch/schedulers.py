"""Detects learning rate schedulers that are stepped but were not passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cluster_ddp.train.own.program import living, reachable

_DEPTH = 4  # a scheduler may be inside another, inside an object of the program's that was passed in


class OtherSchedulers:
    """Warns, after the second step, about schedulers not passed in, such as one for the warm-up made in the epoch.

    Parameters
    ----------
    optimizers
        The optimizers passed in.
    others
        The other objects passed in; schedulers inside them are saved.
    warn
        Called with the message.
    """

    def __init__(self, optimizers: Iterable[Optimizer], others: Iterable[Any], warn: Callable[[str], None]) -> None:
        self._optimizers, self._others, self._warn = list(optimizers), list(others), warn
        self._before: list[tuple[LRScheduler, int]] = []

    def first(self) -> None:
        """Call after the first step."""
        self._before = [(found, found.last_epoch) for found in self._strangers()]

    def second(self) -> None:
        """Call after the second step."""
        before, self._before = self._before, []
        moved = [found for found, was in before if found.last_epoch != was]
        if moved:
            names = ", ".join(sorted({type(found).__name__ for found in moved}))
            self._warn(
                f"the loop steps a learning rate scheduler that was not passed in ({names}), which starts over after a "
                "resume, so the resume is not exact: create it before resumable() and pass it in under its own name "
                "(warmup=warmup)"
            )

    def _strangers(self) -> list[LRScheduler]:
        known = {id(part) for _, part in reachable((("", other) for other in self._others), _DEPTH)}
        return [
            held
            for held in living(LRScheduler)
            if id(held) not in known
            and any(getattr(held, "optimizer", None) is optimizer for optimizer in self._optimizers)
        ]
