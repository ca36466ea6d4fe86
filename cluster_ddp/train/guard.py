"""Ends a training whose loss has stopped being a number."""

from __future__ import annotations

import torch
from torch import nn

from cluster_ddp.train.distributed import all_gather_object
from cluster_ddp.train.errors import NonFiniteError
from cluster_ddp.train.objective import Objective
from cluster_ddp.train.update import Update


class Guard:
    """Counts updates in a row that were left out because the loss or a gradient was not finite.

    Under fp16 gradients overflow now and then, and the scaler lowers its scale until they fit; that counts only when
    the scale is so low that it cannot be the cause.
    """

    def __init__(self, most: int, update: Update, objective: Objective, model: nn.Module) -> None:
        self._most = most
        self._update = update
        self._objective = objective
        self._model = model

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

    def check_weights(self, step: int) -> None:
        """Look at all weights before a save, lest a broken checkpoint takes the place of a sound one.

        The look at each step's gradients is a cheap one: a branch of the model whose own gradient overflows, while the
        loss stays finite, gets past it.

        Raises
        ------
        NonFiniteError
            A weight is not finite; the weights, and so the verdict, are the same on all ranks.
        """
        weights = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        with torch.no_grad():
            sums = torch.stack([weight.sum(dtype=torch.float32) for weight in weights.values()]).isfinite().tolist()
        broken = [name for name, finite in zip(weights, sums, strict=True) if not finite]
        if broken:
            raise NonFiniteError(
                f"after step {step} weights of the model are not finite: {', '.join(broken[:5])}\n"
                "    the loss was finite, a gradient was not; the last checkpoint is sound: set train.clip_norm, which "
                "looks at every gradient, or look at what these weights are used for"
            )

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
