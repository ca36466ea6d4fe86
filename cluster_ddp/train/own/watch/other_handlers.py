"""Detects signal handlers of the program that keep the run from learning that it should stop."""

from __future__ import annotations

from collections.abc import Callable


class OtherHandlers:
    """Warns, after the second step, about signals that the program handles itself, which the run then misses.

    Parameters
    ----------
    unheard
        Returns their names.
    warn
        Called with the message.
    """

    def __init__(self, unheard: Callable[[], list[str]], warn: Callable[[str], None]) -> None:
        self._unheard, self._warn = unheard, warn

    def first(self) -> None:
        """Does nothing: handlers are checked after the second step."""

    def second(self) -> None:
        """Call after the second step."""
        if names := self._unheard():
            self._warn(
                f"the program set its own handler for {', '.join(names)} within the block of join_run(), so the run "
                "does not learn that it should stop, and takes a loop that ends early for a finished one. Remove the "
                "handler, or set it before the block, and check run.stopping"
            )
