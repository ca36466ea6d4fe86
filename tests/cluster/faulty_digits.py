"""The digits task with a fault of its own: at a chosen step it hangs or crashes, for example, or it cannot be made."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cluster_ddp.tasks.digits import Digits

FAULTS = ("import", "crash", "kill", "memory", "hang")
_MUCH = 2 << 30


class FaultyDigits(Digits):
    """Digits whose rank 1 has a fault; the numbers are those of `Digits`.

    Parameters
    ----------
    fault:
        "import": an import fails at the start. "crash": an exception. "kill": SIGKILL. "memory": 2 GiB,
        and an exception should it be given them. "hang": it sleeps forever.
    at:
        The fault comes instead of this forward pass for training, counted from 1 in each process; of two that settle
        DDP's buckets the first two are made.
    marker:
        A file that is left when the fault has come, which then does not come again; None: it comes in every attempt.
    """

    def __init__(self, fault: str, at: int = 10, marker: str | None = None, **params: Any) -> None:
        super().__init__(**params)
        assert fault in FAULTS
        self.fault, self.at, self.marker = fault, at, Path(marker) if marker else None
        self.calls = 0
        if fault == "import":
            import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy in nats, unless the fault is due."""
        self.calls += 1
        if self.calls == self.at and os.environ.get("RANK") == "1" and not (self.marker and self.marker.exists()):
            self._fail()
        return super().loss(model, batch)

    def _fail(self) -> None:
        if self.marker:
            self.marker.touch()
        if self.fault == "crash":
            raise RuntimeError("the fault of the test")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "memory":
            raise RuntimeError(f"was given {len(b'x' * _MUCH)} bytes")
        time.sleep(3600)
