"""Detects updates that a custom loop makes without the optimizers it passed in."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from cluster_ddp.train.optimizer import parameters_of
from cluster_ddp.train.own.values import has_values, sampled


class UpdatesByHand:
    """Tells whether a loop has changed weights itself, as in ``weight.data.add_(weight.grad, alpha=-0.1)``.

    A program that does so may pass in an optimizer that never steps. Weights are compared only until one steps.

    Parameters
    ----------
    optimizers
        Hold the weights.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._weights = parameters_of(*optimizers)
        self._before: int | None = None

    def begin(self) -> None:
        """Call before each batch."""
        if self._weights and self._before is None:
            self._before = self._now()

    def end(self) -> bool:
        """Call after a batch without an update by an optimizer; returns whether weights have changed in it."""
        if not self._weights:
            return False
        before, self._before = self._before, self._now()
        return self._before != before

    def give_up(self) -> None:
        """Call once an optimizer has stepped."""
        self._weights = []

    def _now(self) -> int:
        return sampled(weight for weight in self._weights if has_values(weight))
