"""Enforces, across the `join_run` blocks of a program, that a run has one loop and that a stop ends the program."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from cluster_ddp.printing import say
from cluster_ddp.train.errors import SecondLoopError, TrainError
from cluster_ddp.train.ranks.distributed import find_world

_was_stopped: dict[tuple[Path, int], bool] = {}


class Block:
    """One of the `join_run` blocks that a program has in the same attempt of a run.

    Parameters
    ----------
    directory, attempt
        The run's directory, and the number of the attempt.
    is_run
        Whether cluster-ddp started the program.

    Attributes
    ----------
    is_run
        As passed in.
    thread
        The thread that entered the block.
    has_loop
        Whether the block has a loop.
    is_open
        Whether the block has not been left yet.
    may_run_again
        Whether the block is in a cell of a notebook, or typed in.
    """

    def __init__(self, directory: Path, attempt: int, *, is_run: bool) -> None:
        self._attempt = directory, attempt
        self.thread = threading.get_ident()
        self.is_run, self.has_loop, self.is_open = is_run, False, True
        is_typed = "ipykernel" in sys.modules or not hasattr(sys.modules["__main__"], "__file__")
        self.may_run_again = is_typed and not is_run

    def enter(self) -> None:
        """Call before the block.

        Raises
        ------
        SystemExit
            With status 0: an earlier block of this process was stopped, and that stop applies to this one as well.
        """
        # A program may have a folder for each fold; one that cluster-ddp started has one directory.
        if _was_stopped.get(self._attempt) or (not self.is_run and any(_was_stopped.values())):
            if find_world().is_main:
                say("cluster-ddp: the run was stopped in an earlier block of join_run(): the program ends before this")
            raise SystemExit(0)

    @contextlib.contextmanager
    def only_loop(self) -> Iterator[None]:
        """Wrap the setup of a loop; a loop that is refused does not count, so another may follow.

        Raises
        ------
        SecondLoopError
            This block, or an earlier one, has a loop already.
        TrainError
            The block has been left.
        """
        if not self.is_open:
            raise TrainError(
                "the block of `with join_run() as run:` has ended, and nothing is saved after it: the loop must be "
                "inside the block"
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
        """Call at the end of a block with a loop; not recorded in a notebook."""
        if stopped and not self.is_run and find_world().is_main:  # else the launcher says so
            say("cluster-ddp: stopped as requested: run the same program, or the cell, again to continue from here")
        if not self.may_run_again:
            _was_stopped[self._attempt] = stopped


def expect_group(world_size: int) -> None:
    """Raise a `TrainError` if the program has destroyed the group of its ranks inside the block."""
    if world_size > 1 and not dist.is_initialized():
        raise TrainError(
            "the process group was destroyed inside the block of join_run(), by dist.destroy_process_group() or "
            f"accelerator.end_training(): without it the {world_size} ranks cannot agree on the last save. Remove the "
            "call, or move it after the block"
        )
