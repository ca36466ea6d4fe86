"""Ends training if the loss or the gradients keep being non-finite.

Single updates with a non-finite loss or gradient have been skipped before, by `Update` (update.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cluster_ddp.train.errors import NonFiniteError
from cluster_ddp.train.ranks.distributed import all_gather_object, broadcast_object
from cluster_ddp.train.step import Gradients
from cluster_ddp.train.update import Update


class NonFiniteCheck:
    """Counts consecutive updates skipped because the loss or a gradient was not finite.

    With fp16, gradients overflow occasionally, and the scaler lowers its scale until they fit; this counts only once
    the scale is so low that it cannot be the cause.
    """

    def __init__(self, max_in_a_row: int, update: Update, gradients: Gradients, model: nn.Module) -> None:
        self._max_in_a_row = max_in_a_row
        self._update = update
        self._gradients = gradients
        self.check_weights = FiniteWeights(model).check

    def check(self, step: int) -> int:
        """Return the updates skipped before this step, the same on all ranks; `NonFiniteError` after too many."""
        skipped, in_a_row = self._update.tally()
        if in_a_row >= self._max_in_a_row and not self._scale_may_be_too_high():
            raise NonFiniteError(self._message(step, in_a_row))
        return skipped

    def _scale_may_be_too_high(self) -> bool:
        scaler = self._update.scaler
        return scaler is not None and scaler.get_scale() >= 1.0

    def _message(self, step: int, in_a_row: int) -> str:
        losses = all_gather_object(float(self._gradients.last))
        broken = [f"rank {rank} (loss {loss})" for rank, loss in enumerate(losses) if loss - loss != 0.0]
        where = f"on {', '.join(broken)}" if broken else "in the gradients only; every rank's loss is finite"
        return (
            f"step {step}: {in_a_row} updates in a row had a loss or gradients that are not finite; "
            f"at this step: {where}\n"
            "    those updates were skipped, and the last checkpoint is intact: lower train.lr, set train.clip_norm, "
            "check the data, or raise train.max_bad_steps"
        )


class FiniteWeights:
    """Checks before a save, so that no broken checkpoint replaces an intact one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Such as a mask of minus infinity; whatever is finite now must stay so.
        self._exempt = set(_not_finite(dict(model.named_buffers())))

    def check(self, step: int) -> None:
        """Check weights and buffers before a save.

        Non-finite gradients never reach them, but an update may still overflow, and the task's code may write to them.
        Buffers that were not finite when training started may stay so.

        Raises
        ------
        NonFiniteError
            A weight or a buffer is not finite on rank 0, whose buffers are saved; the weights are the same on all
            ranks.
        """
        named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        broken = broadcast_object([name for name in _not_finite(named) if name not in self._exempt])
        if broken:
            raise NonFiniteError(
                f"after step {step} weights or buffers of the model are not finite: {', '.join(broken[:5])}\n    the "
                "gradients were finite; the last checkpoint is intact: lower train.lr, or check how these are used, "
                "and what loss() and the forward pass write to them"
            )


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with a non-finite element; a finite sum rules one out, any other sum may be an overflow."""
    with torch.no_grad():
        parts = {
            name: torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
            for name, tensor in tensors.items()
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
        }
        by_device: dict[torch.device, list[str]] = {}  # a buffer may have been put on the CPU
        for name, part in parts.items():
            by_device.setdefault(part.device, []).append(name)
        suspects = list[str]()
        for names in by_device.values():
            sums = torch.stack([parts[name].sum(dtype=torch.float32) for name in names]).isfinite().tolist()
            suspects += [name for name, finite in zip(names, sums, strict=True) if not finite]
        return [name for name in suspects if not bool(torch.isfinite(parts[name]).all())]
