"""Detects signal handlers of the program that keep the run from learning that it should stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def watch_other_handlers(replaced_signals: Callable[[], list[str]], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about signals that the program handles itself, which the run then misses.

    Parameters
    ----------
    replaced_signals
        Returns their names.
    warn
        Called with the message.
    """
    yield
    if names := replaced_signals():
        warn(
            f"the program set its own handler for {', '.join(names)} within the block of join_run(), so the run "
            "does not learn that it should stop, and takes a loop that ends early for a finished one. Remove the "
            "handler, or set it before the block, and check run.stopping"
        )
