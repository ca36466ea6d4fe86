"""Requeues the job: retried until it is accepted, refused, or the allocation is nearly over.

There is no hurry while the allocation lasts. Slurm's controller may be away for minutes (a failover, a restart), and
giving up the requeue would end a run that was meant to continue.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.keeper.allocation import Allocation
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused
from cluster_ddp.slurm.control import BRIEF_SECONDS, BUSY_SITE_SECONDS, PARTITION_GONE
from cluster_ddp.slurm.job_info import ALREADY_REQUEUED, CANCEL, TERMINATED

ENDLESS_SECONDS = 24 * 3600.0
"""Of trying as long as nobody ends the job."""

_REFUSALS = 3  # a controller that has just started may refuse what it accepts a moment later
_FIRST_PAUSE = 1.0
_MAX_PAUSE = 15.0  # a controller that comes back after the time limit grants KillWait, 30 s by default
_NOT_ALLOWED = "presently disabled"  # what Slurm says about a job that may not be requeued
_INSTEAD = {
    _NOT_ALLOWED: " (where jobs may not be requeued, `cluster-ddp submit --chain N` queues several for one run)",
    PARTITION_GONE: " (`cluster-ddp resume --set slurm.partition=NAME` continues in another partition)",
}
_UNSURE = (None, TERMINATED)


class RequeueFailed(ClusterDDPError):
    """The job could not be requeued."""


def requeue(
    allocation: Allocation,
    *,
    known: Callable[[], str | None],
    until: Callable[[], float | None],
    delayed: Callable[[str], None],
    unwanted: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Requeue the job; return False if its owner has cancelled or stopped it meanwhile.

    A requeue would bring a cancelled job back.

    Parameters
    ----------
    known
        Returns why the allocation ends, as far as is certain by now. If it is not, the job is requeued only after Slurm
        has confirmed that it was not cancelled: a Slurm that does not answer would not requeue it either.
    until
        Returns when to give up, on the clock, as far as is known by now.
    delayed
        Called once, with the reason, if the first try fails.
    unwanted
        Whether a person has meanwhile asked that the run not continue.

    Raises
    ------
    RequeueFailed
        It was refused, there was no answer in all that time, or Slurm's commands are missing here.
    """
    refusals, pause, said = 0, _FIRST_PAUSE, "Slurm's controller does not answer"
    endless = clock() + ENDLESS_SECONDS
    while True:
        patient = known() in _UNSURE and pause > _FIRST_PAUSE  # only after `delayed` has reported what it waits for
        now = allocation.why_it_ends(BUSY_SITE_SECONDS if patient else BRIEF_SECONDS)
        why = known()
        if CANCEL in (now, why) or unwanted():
            return False
        if ALREADY_REQUEUED & {now, why}:  # by Slurm itself, or by a call that timed out but was accepted
            return True
        if now is None and (missing := allocation.missing_command()):
            refusals, said = refusals + 1, missing  # the command may be away with its storage for a moment
        elif now is not None or why not in _UNSURE:
            try:
                allocation.requeue()
            except SlurmRefused as error:
                refusals, said = refusals + 1, str(error)
            except SlurmError as error:
                said = str(error)
            else:
                return True
        if refusals >= _REFUSALS or clock() + pause > (until() or endless):
            hint = next((hint for sign, hint in _INSTEAD.items() if refusals and sign in said), "")
            raise RequeueFailed(f"Slurm has not requeued the job{hint}: {said}")
        if pause == _FIRST_PAUSE:
            delayed(said.splitlines()[0])
        sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE)
