"""Detects a custom loop that continues in evaluation mode after an evaluation."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class TrainingMode:
    """Warns, once, if a model is in evaluation mode at an update and was in training mode at an earlier one.

    This is usually an oversight. If the program calls ``train()`` only once, after the state is restored, it also
    trains in a different mode after a resume than without one.

    Parameters
    ----------
    model
        The model that is trained, or several in a ModuleDict.
    warn
        Called with the message.
    """

    def __init__(self, model: nn.Module, warn: Callable[[str], None]) -> None:
        self._models = list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
        self._warn: Callable[[str], None] | None = warn
        self._trained: list[nn.Module] = []

    def check(self) -> None:
        """Call before each update."""
        if self._warn is None:
            return
        self._trained += [model for model in self._models if model.training and model not in self._trained]
        for model in self._trained:
            if not model.training:
                self._warn(
                    f"{type(model).__name__} is in evaluation mode at an update, but was in training mode at earlier "
                    "ones: dropout and BatchNorm behave differently there, and a resume may start in the other mode. "
                    "Call model.train() after each evaluation"
                )
                self._warn = None
                return
