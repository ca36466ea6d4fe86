"""Ends a training whose loss has stopped being a number."""

from __future__ import annotations

from cluster_ddp.train.distributed import all_gather_object
from cluster_ddp.train.errors import NonFiniteError
from cluster_ddp.train.objective import Objective
from cluster_ddp.train.update import Update


class Guard:
    """Counts updates in a row that were left out because the loss or a gradient was not finite.

    Under fp16 gradients overflow now and then, and the scaler lowers its scale until they fit; that counts only when
    the scale is so low that it cannot be the cause.
    """

    def __init__(self, most: int, update: Update, objective: Objective) -> None:
        self._most = most
        self._update = update
        self._objective = objective

    def check(self, step: int) -> int:
        """Look back at the updates before this step, the same on all ranks.

        Returns
        -------
        The number of updates left out so far.

        Raises
        ------
        NonFiniteError
            There were more in a row than allowed. Nothing of them is in the weights.
        """
        skipped, in_a_row = self._update.left_out()
        if in_a_row >= self._most and not self._scale_may_be_too_high():
            raise NonFiniteError(self._message(step, in_a_row))
        return skipped

    def _scale_may_be_too_high(self) -> bool:
        scaler = self._update.scaler
        return scaler is not None and scaler.get_scale() >= 1.0

    def _message(self, step: int, in_a_row: int) -> str:
        losses = all_gather_object(float(self._objective.last))
        broken = [f"rank {rank} (loss {loss})" for rank, loss in enumerate(losses) if loss - loss != 0.0]
        where = ", ".join(broken) if broken else "the gradients only: every rank's loss is finite"
        return (
            f"step {step}: {in_a_row} updates in a row had a loss or gradients that are not finite; "
            f"at this step on: {where}\n"
            "    those updates were not made, and the last checkpoint is sound: lower train.lr, set train.clip_norm, "
            "look at the data, or allow more by train.max_bad_steps"
        )
