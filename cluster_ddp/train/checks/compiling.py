"""Tells if torch goes on compiling as training goes on, because a resume then compiles other code.

What torch compiles for a shape or a number depends on those that this process has seen before: at first it is compiled
for just this one, later for all of them, and after several not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class Compiling:
    """Watches the steps after the first one of an attempt.

    Parameters
    ----------
    warn
        Prints a warning on rank 0.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._before: int | None = None  # None in the first step
        self._is_over = False

    def evaluated(self) -> None:
        """Call after an evaluation, which may compile as well: a resume repeats it at the same place."""
        if self._before is not None:
            self._before = _compiled()

    def end(self, step: int) -> None:
        """Call after a step, which is counted from 1."""
        if self._is_over:
            return
        now = _compiled()
        if self._before not in (None, now):
            self._is_over = True
            self._warn(
                f"torch has compiled something again in step {step} of training: what it compiles depends on the "
                "shapes and numbers that this process has seen, so a resume may not be exact. Give all batches the "
                "same shape, and hold numbers that change from step to step and that the model computes with, such as "
                "a count of steps, in a tensor"
            )
        self._before = now


def _compiled() -> int:
    """How often torch has compiled something; 0 while its compiler is not even imported."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["frames"]["total"])
