"""Ends a custom loop whose GradScaler skips too many updates in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cluster_ddp.train.errors import NonFiniteError


class SkippedUpdates:
    """Counts consecutive updates skipped by a GradScaler for which its scale cannot be the cause.

    Gradients overflow if the scale is too high, and the scaler lowers it until they fit. If it gets below 1, the
    gradients themselves are not finite. Gradient accumulation leaves the scale unchanged and does not count.

    Parameters
    ----------
    scalers
        The scalers passed in.
    max_in_a_row
        ``train.max_bad_steps``.
    """

    def __init__(self, scalers: Sequence[torch.amp.GradScaler], max_in_a_row: int) -> None:
        self._scalers = scalers
        self._scales = [-math.inf] * len(scalers)  # at the last step without an update; reading waits for the GPU
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def check(self, step: int, *, updated: bool) -> None:
        """Call after each step.

        Parameters
        ----------
        step
            Number of finished steps.
        updated
            Whether an optimizer has stepped.

        Raises
        ------
        NonFiniteError
            There were too many in a row; raised on all ranks, because they have the same gradients.
        """
        if updated or not self._scalers:
            self._in_a_row = 0
            return
        before, self._scales = self._scales, [scaler.get_scale() for scaler in self._scalers]
        if any(now < min(then, 1.0) for now, then in zip(self._scales, before, strict=True)):
            self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            raise NonFiniteError(
                f"after step {step} the GradScaler has skipped {self._in_a_row} updates in a row, and its scale of "
                f"{min(self._scales):.3g} is too low to be the cause: the loss or the gradients are not finite\n"
                "    the last checkpoint is intact: lower the learning rate, clip the gradients, check the data, or "
                "raise train.max_bad_steps"
            )
