"""One optimizer update: unscale, clip, judge, step, and the count of updates that were left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.delayed import HostCopy
from cluster_ddp.train.optimizer import start_momentum, takes_found_inf

_FIRST = 4


class Update:
    """Applies the gradients, unless they are not finite.

    An update with a non-finite gradient would ruin the weights for good, so it is left out. Whether it is, is read from
    the gradients after they have been reduced, so that all ranks come to the same verdict without asking each other.
    On a GPU the verdict stays there (fused optimizers take it) and the host reads it one update later, when it has long
    been known; other optimizers make the host wait.

    Parameters
    ----------
    optimizer
        What is stepped.
    parameters
        The trainable parameters.
    clip_norm
        The largest norm of all gradients together; None: no clipping.
    scaler
        The gradient scaler of fp16, or None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        *,
        clip_norm: float | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.norm: Tensor | None = None
        self._parameters = list(parameters)
        # The smallest of the first layers', because it is added up in every step.
        self._first = sorted(self._parameters[:_FIRST], key=lambda one: one.numel()) + self._parameters[_FIRST:]
        self._clip_norm = clip_norm
        self._verdict = _Verdict()
        self._on_device = self._parameters[0].device.type != "cpu"
        self._fused = takes_found_inf(optimizer)
        if self._on_device or scaler is not None:  # else the optimizer is not called for an update that is left out
            start_momentum(optimizer)

    @property
    def skipped(self) -> int:
        """Updates left out so far, as far as the host knows: on a GPU without the last one."""
        return self._verdict.skipped

    def left_out(self) -> tuple[int, int]:
        """Updates left out so far, and those since the last one that was made."""
        self._verdict.read()
        return self._verdict.skipped, self._verdict.in_a_row

    def restore(self, skipped: int, in_a_row: int) -> None:
        """Set both counts."""
        self._verdict.skipped, self._verdict.in_a_row = skipped, in_a_row

    def apply(self) -> None:
        """Make the update from the gradients at hand, and let go of them."""
        if self.scaler is not None:
            self._apply_scaled(self.scaler)
        else:
            self._apply_plain()
        for parameter in self._parameters:  # as optimizer.zero_grad() does, in a tenth of its time
            parameter.grad = None

    def _apply_plain(self) -> None:
        self._clip()
        bad = self._is_bad()
        if isinstance(bad, bool):
            self._verdict.say(bad)
            if not bad:
                self.optimizer.step()
        elif self._fused:
            self._verdict.give(bad)
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            self.optimizer.step()
        else:
            left_out = bool(bad)
            self._verdict.say(left_out)
            if not left_out:
                self.optimizer.step()

    def _apply_scaled(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)
        self._clip()
        found = next(iter(scaler._found_inf_per_device(self.optimizer).values()))
        if self._on_device:
            self._verdict.give(found.clone())  # the scaler reuses it
        else:
            self._verdict.say(bool(found))
        scaler.step(self.optimizer)
        scaler.update()

    def _clip(self) -> None:
        if self._clip_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)

    def _is_bad(self) -> bool | Tensor:
        """Judge the gradients by their norm where it is known, else by a witness that all of them lead to.

        A gradient that is not finite makes those of all earlier layers not finite, so the first parameters' tell.
        """
        witness = self.norm if self._clip_norm is not None else self._find_witness()
        if witness is None:
            return False
        if self._on_device:
            return (~torch.isfinite(witness)).float()
        value = witness.item()
        return value - value != 0.0  # true for an infinity and for a NaN

    def _find_witness(self) -> Tensor | None:
        for parameter in self._first:
            if parameter.grad is not None:
                return parameter.grad.sum()
        return None


class _Verdict:
    """Counts what was left out. A verdict that is on the device is read when the next one comes, or when asked."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0
        self._under_way: HostCopy | None = None

    def say(self, left_out: bool) -> None:
        self.skipped += left_out
        self.in_a_row = self.in_a_row + 1 if left_out else 0

    def give(self, left_out: Tensor) -> None:
        self.read()
        self._under_way = HostCopy(left_out.reshape(1))

    def read(self) -> None:
        if self._under_way is not None:
            (left_out,) = self._under_way.read()
            self._under_way = None
            self.say(left_out != 0.0)
