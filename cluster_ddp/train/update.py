"""Updates the weights from the gradients of a step, or skips the update if a gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.checkpoint.replicas import tensor_digests
from cluster_ddp.train.checks.unsuited_optimizers import other_settings, refuse_without_closure, refuse_without_group
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.metrics.losses import HostCopy
from cluster_ddp.train.optimizer import start_momentum, takes_found_inf
from cluster_ddp.train.step import gradients_of


class Update:
    """Updates the weights, unless the gradients are not finite: call `clip`, then `step`.

    An update with a non-finite gradient would ruin the weights for good, so it is skipped. The decision is computed
    from all gradients after they were reduced, so all ranks come to the same one without communicating. On a GPU the
    result stays there (fused optimizers accept it) and the host reads it one update later, when it has long been
    available; with other optimizers the host waits.

    Parameters
    ----------
    clip_norm
        The maximum norm of all gradients together; None: no clipping.

    Raises
    ------
    TaskError
        The gradient scaler cannot work with these parameters.
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
        self._clip_norm = clip_norm
        self._tally = Tally()
        self._on_device = self._parameters[0].device.type != "cpu"
        self._fused = takes_found_inf(optimizer)
        self._clears_more = type(optimizer).zero_grad is not Optimizer.zero_grad  # such as the gradients of each sample
        if scaler is not None and any(parameter.dtype is torch.float16 for parameter in self._parameters):
            raise TaskError(
                "train.precision: fp16 keeps the parameters in fp32, but model() gives parameters in fp16: leave them "
                "in fp32, or set train.precision: fp32"
            )
        self._was_skipped: bool | Tensor = False
        self._is_trained = False  # whether a step has given a gradient, or changed the parameters by itself
        self._untrained: Tensor | None = None  # until then, the digests of the parameters after the first step
        self._was_restored = False  # whether the optimizer state was loaded from a checkpoint
        if scaler is not None:
            optimizer.register_step_pre_hook(self._note_call)
        # On the CPU without a scaler, the optimizer is not called at all for a skipped update.
        start_momentum(optimizer, spoilt=self._on_device or scaler is not None)

    @property
    def skipped(self) -> int:
        """Skipped updates so far, as known to the host: on a GPU, without the last one."""
        return self._tally.skipped

    def tally(self) -> tuple[int, int]:
        """Skipped updates so far, in total and in a row up to now."""
        self._tally.read()
        return self._tally.skipped, self._tally.in_a_row

    def restore(self, skipped: int, in_a_row: int) -> None:
        """Restore what `tally` returned; call it after the optimizer state has been restored."""
        self._tally.skipped, self._tally.in_a_row = skipped, in_a_row
        self._was_restored = bool(self.optimizer.state)

    def clip(self) -> None:
        """Unscale the gradients, then clip their norm, as far as the settings ask for either."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in self._parameters):
                raise TaskError(SPARSE_CLIPPED)
            self.norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)

    def step(self, *, expects_gradients: bool = True) -> bool | Tensor:
        """Check the gradients, make or skip the update, and free the gradients.

        Parameters
        ----------
        expects_gradients
            Whether the loss of this step was computed from weights.

        Returns
        -------
        Whether the update was skipped; on a device, where the host does not wait, a tensor of one element, 1.0 if it
        was.

        Raises
        ------
        TaskError
            Two steps have given no parameter a gradient.
        """
        if expects_gradients and not self._is_trained:
            self._expect_gradients()
        try:
            was_skipped = self._step_plain() if self.scaler is None else self._step_scaled(self.scaler)
        except (RuntimeError, ValueError) as error:
            refuse_without_group(error)
            raise
        except (AssertionError, TypeError) as error:
            refuse_without_closure(self.optimizer, error)
            raise
        except KeyError as error:
            if self._was_restored and (message := other_settings(self.optimizer, error)):
                raise TaskError(message) from error
            raise
        # Like optimizer.zero_grad(), which takes three to six times as long, but for all parameters, not only the
        # optimizer's.
        for parameter in self._parameters:
            parameter.grad = None
        if self._clears_more:
            self.optimizer.zero_grad()
        return was_skipped

    def _expect_gradients(self) -> None:
        if gradients_of(self._parameters):
            self._is_trained, self._untrained = True, None
            return
        # What changes nevertheless is updated in the backward pass, by hooks that leave no gradients.
        before, self._untrained = self._untrained, tensor_digests([weight.detach() for weight in self._parameters])
        if before is None:
            return
        self._is_trained = not torch.equal(before, self._untrained)
        if not self._is_trained:
            raise TaskError(
                "two steps have given no parameter of model() a gradient, so nothing is trained: compute the loss with "
                "the model that loss() is given, or with the one that model() returned, not with another"
            )

    def _step_plain(self) -> bool | Tensor:
        bad = self._is_bad()
        if isinstance(bad, Tensor):
            if self._fused:
                self._tally.count_later(bad)
                self.optimizer.found_inf = bad  # type: ignore[attr-defined]
                self.optimizer.step()
                return bad
            bad = bool(bad)
        self._tally.count(bad)
        if not bad:
            self.optimizer.step()
        return bad

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> bool | Tensor:
        self._was_skipped = True  # unless the optimizer is called
        scaler.step(self.optimizer)
        was_skipped = self._was_skipped.clone() if isinstance(self._was_skipped, Tensor) else self._was_skipped
        scaler.update()
        if isinstance(was_skipped, Tensor) and self._on_device:
            self._tally.count_later(was_skipped)
            return was_skipped
        self._tally.count(bool(was_skipped))
        return bool(was_skipped)

    def _note_call(self, optimizer: Optimizer, *_: object) -> None:
        """Step hook: called by the scaler only for finite gradients; if fused, always, with `found_inf` set."""
        self._was_skipped = getattr(optimizer, "found_inf", False)

    def _is_bad(self) -> bool | Tensor:
        """Check the gradients by their norm if it is known, else one by one."""
        if self._clip_norm is not None and self.norm is not None:
            if self._on_device:
                return _one_unless_finite(self.norm)
            return not math.isfinite(self.norm.item())
        gradients = gradients_of(self._parameters)
        if not gradients:
            return False
        return any_not_finite_on_device(gradients) if self._on_device else any_not_finite(gradients)


SPARSE_CLIPPED = (
    "train.clip_norm: torch cannot limit the norm of sparse gradients: give the embeddings sparse=False, or omit "
    "train.clip_norm"
)


def any_not_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether any element is not finite, on the CPU.

    A finite sum proves that all elements are finite, in a fifth of the time of finding the largest one. If the sum is
    not finite, it may just have overflowed, so every element is checked.
    """
    total = sum([gradient.sum().item() for gradient in gradients])
    if total - total == 0.0:  # NaN if an element is infinite or NaN; for complex numbers, in both parts
        return False
    return not all(bool(torch.isfinite(_values(gradient)).all()) for gradient in gradients)


def any_not_finite_on_device(gradients: Sequence[Tensor]) -> Tensor:
    """The same for a GPU, as a number there; computing the maximum takes no longer than reading the gradients."""
    values = [found for gradient in gradients if (found := _values(gradient)).numel()]  # an empty one has no maximum
    if not values:
        return gradients[0].new_zeros((), dtype=torch.float32)
    return _one_unless_finite(torch.stack(torch._foreach_norm(values, math.inf)).amax())  # NaN if one is


def _one_unless_finite(number: Tensor) -> Tensor:
    """1.0 if it is an infinity or NaN, else 0.0; two kernels, where `torch.isfinite` alone takes four."""
    return (number - number).ne_(0.0).float()


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class Tally:
    """Counts skipped updates. A result on the device is read when the next one arrives, or when asked for."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0
        self._copy: HostCopy | None = None
        self._is_under_way = False

    def count(self, was_skipped: bool) -> None:
        self.skipped += was_skipped
        self.in_a_row = self.in_a_row + 1 if was_skipped else 0

    def count_later(self, was_skipped: Tensor) -> None:
        self.read()
        if self._copy is None:
            self._copy = HostCopy(was_skipped.reshape(1))
        else:
            self._copy.take(was_skipped.reshape(1))
        self._is_under_way = True

    def read(self) -> None:
        if self._copy is not None and self._is_under_way:
            (was_skipped,) = self._copy.read()
            self._is_under_way = False
            self.count(was_skipped != 0.0)
