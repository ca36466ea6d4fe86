"""The paced digits on a slow disk: each shard of a checkpoint takes its time to be written."""

from __future__ import annotations

import os
import time
from typing import Any

from paced_digits import PacedDigits

_MORE_THAN_A_LINE = 4096  # events and metrics are not slow


class SlowDiskDigits(PacedDigits):
    """Paced digits whose process writes large pieces slowly; the numbers are those of `Digits`.

    Parameters
    ----------
    writing:
        Seconds that each large piece takes.
    """

    def __init__(self, writing: float, **params: Any) -> None:
        super().__init__(**params)
        write = os.write

        def slow_write(fd: int, data: Any) -> int:
            if len(data) > _MORE_THAN_A_LINE:
                time.sleep(writing)
            return write(fd, data)

        os.write = slow_write
