"""Refuses updates made before a custom loop begins, outside of its block of `join_run`, or in another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cluster_ddp.train.errors import TrainError

_UPDATED_OUTSIDE_OF_STEPS = "an optimizer stepped before the loop began: train inside `for step in run.steps(...):`"
_UPDATED_BEFORE_A_BATCH = (
    "an optimizer stepped before a batch was taken from what resumable() returned: train inside `for epoch in "
    "loader.epochs():` and, within it, `for batch in loader:`, where `loader = run.resumable(loader, ...)`; not on "
    "the DataLoader that was passed in, nor on what Accelerate's skip_first_batches() makes of it. A resume within "
    "the epoch would repeat such an update; training on another loader belongs after the batches of the epoch"
)


class Beginning:
    """Tracks how far a loop has got between the call that returns it and its first batch.

    Parameters
    ----------
    draws_itself
        Whether the loop comes from `ScriptRun.steps`.

    Attributes
    ----------
    awaits_batches
        Whether a batch has to be taken before the next update.
    thread
        The thread that entered the block.
    """

    def __init__(self, *, draws_itself: bool) -> None:
        self._message = _UPDATED_OUTSIDE_OF_STEPS if draws_itself else _UPDATED_BEFORE_A_BATCH
        self._is_awaited = self.awaits_batches = False
        self.thread = self._runs_in = threading.get_ident()

    def hand_out(self) -> None:
        """Call when the program receives its loop."""
        self._is_awaited = self.awaits_batches = True

    def begin(self) -> None:
        """Call when the program begins the loop."""
        self._is_awaited = False

    def batch(self) -> None:
        """Call when the loop takes a batch."""
        self.awaits_batches = False
        self._runs_in = threading.get_ident()

    def expect_no_epoch(self, kept: Iterable[str]) -> None:
        """Call when the program keeps values, with their names.

        Raises
        ------
        TrainError
            An epoch has begun, and none of its batches: the next epoch would keep them again.
        """
        if self.awaits_batches and not self._is_awaited:
            names = list(kept)
            raise TrainError(
                f"run.keep({', '.join(f'{name}=...' for name in names)}) is called in an epoch, before its batches, "
                "and so again in the next one: each call gives the initial value, in the place of which a resume puts "
                f"the saved one. Call it once, before the loop, and set kept.{names[0]} where the epoch begins"
            )

    def expect_batch(self) -> None:
        """Call at an update.

        Raises
        ------
        TrainError
            The update belongs to no batch.
        """
        if self.awaits_batches:
            raise TrainError(self._message)

    def expect_thread(self) -> None:
        """Check that the batches are taken by the thread that entered the block.

        Raises
        ------
        TrainError
            A different thread takes them, and a stop would end that thread instead of the block.
        """
        if self._runs_in != self.thread:
            raise TrainError(
                "the loop runs in a different thread than `with join_run() as run:`, so a stop could not end the "
                "block: run the loop in the block itself, and use threads for the other work"
            )

    def expect_begun(self) -> None:
        """Call at the end of the block.

        Raises
        ------
        TrainError
            The loop has not begun, or ran in a different thread.
        """
        self.expect_thread()
        if self._is_awaited:
            raise TrainError(
                "the block of `with join_run() as run:` ended before its loop began, and nothing is saved after the "
                "block: move the loop over what resumable() or steps() returned into it"
            )
