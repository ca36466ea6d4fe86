"""The digits task with a brake, so that a test's fault comes while training is under way, not before or after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cluster_ddp.tasks.digits import Digits


class PacedDigits(Digits):
    """Digits that takes its time for each step as long as a file exists; the numbers are those of `Digits`.

    Parameters
    ----------
    brake:
        Path of the file.
    seconds:
        How long each micro-batch waits.
    needs:
        Path of a file that it reads at its start, and that a node may lack.
    """

    def __init__(self, brake: str, seconds: float = 0.5, needs: str | None = None, **params: Any) -> None:
        super().__init__(**params)
        self.brake = Path(brake)
        self.seconds = seconds
        if needs is not None:
            Path(needs).read_bytes()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats, after the wait."""
        if self.brake.exists():
            time.sleep(self.seconds)
        return super().loss(model, batch)
