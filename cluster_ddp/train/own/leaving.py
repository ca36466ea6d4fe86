"""Ends the block at a stop, makes the ranks leave an epoch together, and reports a rank that left alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from cluster_ddp.printing import say
from cluster_ddp.train.ranks.distributed import World, host_group

LEAVING_SECONDS = 10.0  # seconds: a rank may have something to do alone before it leaves, such as an evaluation


class LeaveBlock(BaseException):
    """Raised inside the loop to end the block of `join_run`, so that code after the loop does not run."""

    def __init__(self) -> None:
        super().__init__(
            "all ranks have agreed to stop, which ends the block of `with join_run() as run:`; the loop must be in it"
        )


class Leaving:
    """Waits at the end of an epoch or the loop until all ranks have left it.

    If a rank left early, by ``break``, while the others continued, its gradients of the next epoch would be summed with
    theirs of this one. Ranks that never leave cannot be distinguished from slow ones, so this is reported after some
    seconds, long before the hang watchdog ends all ranks.

    Parameters
    ----------
    warn
        Called with the message on rank 0.

    Attributes
    ----------
    early
        What this rank left before its end, for the message; None if nothing.
    """

    def __init__(self, world: World, warn: Callable[[str], None]) -> None:
        self._world, self._warn = world, warn
        self.early: str | None = None

    def meet(self) -> None:
        """Wait for the other ranks."""
        if self._world.world_size == 1:
            return
        # Not all_reduce: a rank that has not left may be in the one for stops, and Gloo would match the two.
        here = torch.zeros(1)
        work = dist.all_gather(
            [torch.empty_like(here) for _ in range(self._world.world_size)], here, group=host_group(), async_op=True
        )
        end = time.monotonic() + LEAVING_SECONDS
        while self.early is not None and not work.is_completed():
            if time.monotonic() > end:
                self._tell()
                break
            time.sleep(0.001)
        work.wait()

    def _tell(self) -> None:
        # Not "rank 1 left": the node program takes such a line for a rank's last words, and not for a warning.
        message = (
            f"the ranks do not leave together: rank {self._world.rank} left {self.early}, and {LEAVING_SECONDS:g} s "
            "later not all of the other ranks have done so. If they continue, they wait for this rank forever: let all "
            "ranks leave after the same batch, going by something that is the same on all of them, such as a loss "
            "summed by dist.all_reduce()"
        )
        if self._world.is_main:
            self._warn(message)
        else:
            say(f"cluster-ddp: {message}")
