"""The exponential moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """Keeps ``average = decay * average + (1 - decay) * weights``, beginning with the first update's weights.

    Buffers (BatchNorm's statistics among them) are those of the model. The average is what evaluation sees and what
    ``export --ema`` gives.

    Attributes
    ----------
    model
        A model of its own that holds the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model)
        self._begun = False
        self._take_in = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._averages, self._copies = _parts(self.model)
        self._weights, self._others = _parts(model)

    def update(self) -> None:
        """Take in the weights after an update.

        The host does not wait for a GPU, as it would in torch's AveragedModel, which copies its count of updates there.
        """
        with torch.no_grad():
            if self._begun:
                self._take_in(self._averages, self._weights, None)
            else:
                torch._foreach_copy_(self._averages, self._weights)
                self._begun = True
            for mine, theirs in zip(self._copies, self._others, strict=True):
                mine.copy_(theirs)

    def tensors(self) -> dict[str, Tensor]:
        """The averaged weights and buffers by the names that they have in the model."""
        return dict(self.model.state_dict())

    def restore(self, updates: int) -> None:
        """Say how many updates are in the average whose tensors have been put back."""
        self._begun = updates > 0


def _parts(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """What can be averaged, and what is copied: the buffers, and parameters of whole numbers."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    averaged = [one for one in parameters if one.is_floating_point() or one.is_complex()]
    whole = [one for one in parameters if not (one.is_floating_point() or one.is_complex())]
    return averaged, whole + [buffer.detach() for buffer in model.buffers()]
