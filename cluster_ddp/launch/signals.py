"""The signals of this platform. Windows has few; what uses them there is none the worse, but must be importable."""

from __future__ import annotations

import signal

KILL: signal.Signals = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process that does nothing against it."""


def present(*names: str) -> tuple[signal.Signals, ...]:
    """Those of the signals with these names, such as SIGUSR1, that there are here."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))
