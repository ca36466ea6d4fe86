"""The exponential moving average of the weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Ema:
    """Keeps ``average = decay * average + (1 - decay) * weights``, beginning with the first update's weights.

    Buffers (BatchNorm's statistics among them) are those of the model. The average is what evaluation sees and what
    ``export --ema`` gives.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._source = model
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    @property
    def model(self) -> nn.Module:
        """A model of its own that holds the average."""
        module: nn.Module = self._averaged.module
        return module

    def update(self) -> None:
        """Take in the weights after an update."""
        self._averaged.update_parameters(self._source)

    def tensors(self) -> dict[str, Tensor]:
        """The averaged weights and buffers by the names that they have in the model."""
        return dict(self.model.state_dict())

    def restore(self, updates: int) -> None:
        """Say how many updates are in the average whose tensors have been put back."""
        self._averaged.n_averaged.fill_(updates)
