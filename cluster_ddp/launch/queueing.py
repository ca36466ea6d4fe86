"""Having the job queued again: tried until it is accepted, refused, or the allocation is nearly over.

Nothing presses while the allocation lasts. Slurm's controller may be away for minutes (a failover, a restart), and a
requeue that is given up is the end of a run that wanted to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster_ddp.job.errors import ClusterDDPError
from cluster_ddp.launch.allocation import Allocation
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused
from cluster_ddp.slurm.shown import CANCEL, REQUEUED, TERMINATED

_REFUSALS = 3  # a controller that has just started may say no to what it takes a moment later
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0  # a controller that comes back after the time limit gives KillWait, 30 s by default
_ASIDE_SECONDS = 5.0  # for an answer that can be done without
_ANSWER_SECONDS = 60.0  # a busy site may take 40 s for one


class RequeueFailed(ClusterDDPError):
    """The job is not queued again, although it was to be."""


def queue_again(
    allocation: Allocation,
    *,
    known: str | None,
    until: float,
    delayed: Callable[[str], None],
    unwanted: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Have the job queued again; False when its owner has cancelled or stopped it meanwhile.

    A requeue would bring a cancelled job back.

    Parameters
    ----------
    known
        Why the allocation ends, as far as is known. Where nothing is known, the job is not queued again without
        Slurm's word that it was not cancelled.
    until
        When to give up, on the clock.
    delayed
        Called once, with the reason, when it does not work at the first try.
    unwanted
        Whether a person has asked meanwhile that the run is not to go on.

    Raises
    ------
    RequeueFailed
        It was refused, or there was no answer in all that time.
    """
    refusals, pause, said = 0, _FIRST_PAUSE, "Slurm's controller does not answer"
    explained = known not in (None, TERMINATED)
    while True:
        now = allocation.why_it_ends(_ASIDE_SECONDS if explained else _ANSWER_SECONDS)
        if now == CANCEL or unwanted():
            return False
        if now == REQUEUED:  # a call that was given up had been accepted
            return True
        if now is not None or explained:
            try:
                allocation.queue_again()
            except SlurmRefused as error:
                refusals, said = refusals + 1, str(error)
            except SlurmError as error:
                said = str(error)
            else:
                return True
        if refusals >= _REFUSALS or clock() + pause > until:
            raise RequeueFailed(f"Slurm has not queued the job again: {said}")
        if pause == _FIRST_PAUSE:
            delayed(said.splitlines()[0])
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
