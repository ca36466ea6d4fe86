"""Protects the server that forks workers, by which Python starts processes since 3.14 unless told otherwise."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.context import BaseContext

from cluster_ddp.launch.processes import ASK_TO_STOP

_IN_THE_SERVER = "cluster_ddp.train.data.in_fork_server"


def protect_fork_server(context: BaseContext | None = None) -> None:
    """Start the fork server, if workers are started by one, so that signals to the process group do not kill it.

    It would take all workers with it.

    Parameters
    ----------
    context
        The context that starts the workers; None: that of multiprocessing itself.
    """
    if (context or multiprocessing).get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()  # first, because it unblocks signals as it starts
    # There is no public way to ask for what the program itself wants to have imported there.
    wanted = getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", ["__main__"])
    if _IN_THE_SERVER not in wanted:
        forkserver.set_forkserver_preload([*wanted, _IN_THE_SERVER])
    # It inherits that they are blocked, until it has imported the module.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
