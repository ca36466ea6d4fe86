"""What came of the blocks of `join_run` that this process has left: a run has one loop, and a stop ends the program."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.printing import say
from cluster_ddp.train.distributed import find_world
from cluster_ddp.train.errors import SecondLoopError, TrainError

_was_stopped: dict[tuple[Path, int], bool] = {}


class Block:
    """One block of `join_run` among those that a program has for the same attempt of a run.

    Parameters
    ----------
    directory, attempt
        Of the run.
    is_run
        Whether cluster-ddp has started it.

    Attributes
    ----------
    is_run
        The same.
    thread
        The one that has entered it.
    has_loop
        Whether a loop has been taken over in it.
    is_open
        Whether it has not been left.
    """

    def __init__(self, directory: Path, attempt: int, *, is_run: bool) -> None:
        self._attempt = directory, attempt
        self.thread = threading.get_ident()
        self.is_run, self.has_loop, self.is_open = is_run, False, True

    def enter(self) -> None:
        """Call before the block.

        Raises
        ------
        SystemExit
            With status 0: an earlier block was stopped, and what asked for that asks this one as well.
        """
        if _was_stopped.get(self._attempt):
            if find_world().is_main:
                say("cluster_ddp: the run was stopped in an earlier block of join_run(): the program ends before this")
            raise SystemExit(0)

    @contextlib.contextmanager
    def only_loop(self) -> Iterator[None]:
        """Around all that takes a loop over: one that is refused is none, and may be followed by another.

        Raises
        ------
        SecondLoopError
            This block has one, or an earlier one had.
        TrainError
            The block has been left.
        """
        if not self.is_open:
            raise TrainError(
                "the block of `with join_run() as run:` has been left, and nothing is saved behind it: the loop has to "
                "be in the block"
            )
        if self.has_loop or self._attempt in _was_stopped:
            raise SecondLoopError
        self.has_loop = True
        try:
            yield
        except Exception:
            self.has_loop = False
            raise

    def leave(self, *, stopped: bool) -> None:
        """Call at the end of a block with a loop. The cell of a notebook is run again by whoever wants that."""
        by_hand = "ipykernel" in sys.modules or not hasattr(sys.modules["__main__"], "__file__")
        if self.is_run or not by_hand:
            _was_stopped[self._attempt] = stopped
