"""Waits for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 240.0
"""Seconds for what takes one where nothing else runs."""


def wait_for(ready: Callable[[], T | None], what: str | Callable[[], str] = "", seconds: float = PATIENCE) -> T:
    """Wait until something is there or holds, and return it; `what` is said if it takes too long."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
    return found
