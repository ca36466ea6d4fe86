"""Notes whether code after a custom loop changes the weights, as by loading the best ones."""

from __future__ import annotations

from torch import nn

from cluster_ddp.train.own.values import has_values, sampled

GOES_ON_FROM_OTHERS = (
    "the code after the loop had changed the weights, for example by loading the best ones, and training goes on from "
    "these: its result is not that of a run that had this many steps from the beginning. For that, export such weights "
    "instead of loading them into the model"
)
"""What is told of a completed run that goes on for more steps."""


class AfterLoop:
    """Compares the weights at the end of the block with those at the end of the loop.

    Attributes
    ----------
    has_changed
        Whether they differ.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained: int | None = None
        self.has_changed = False

    def begin(self) -> None:
        """Call after the last step."""
        self._trained = self._sample()

    def end(self) -> None:
        """Call at the end of the block."""
        self.has_changed = self._trained not in (None, self._sample())

    def _sample(self) -> int:
        held = (*self._model.parameters(), *self._model.buffers())
        return sampled(tensor for tensor in held if has_values(tensor))
