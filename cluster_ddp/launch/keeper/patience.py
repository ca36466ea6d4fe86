"""Waiting for storage that is full, fails or hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cluster_ddp.launch.keeper.batch_host import BatchHost, say
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.storage import FULL_ERRORS, PASSING_ERRORS

T = TypeVar("T")

ROOM_SECONDS = 900.0
PASSING_SECONDS = 45.0
"""For which storage may fail, other than by being full: its server may fail over or restart."""

_POLL_SECONDS = 1.0
_SLOW_SECONDS = 10.0  # after which storage counts as hanging


def patiently(
    do: Callable[[], T],
    run: RunDirectory,
    *,
    host: BatchHost,
    pause: Callable[[float], None],
    unless: Callable[[], bool],
    too_near: Callable[[], bool],
    patience: float = ROOM_SECONDS,
) -> T | None:
    """Do what precedes an attempt, waiting while storage is full, fails or hangs: ending the job would end the run.

    Returns None if storage does not respond in that time.

    Parameters
    ----------
    unless
        Whether the job is ended; then storage is not waited for any longer, unless it responds within seconds.
    too_near
        Whether there is no time to wait at all.
    patience
        Seconds to wait for room, or for storage to respond. Other errors of storage either pass sooner or do not pass.
    """
    began, said = host.now(), False
    while True:
        tried = host.now()

        def hangs(tried: float = tried) -> bool:
            nonlocal said
            if too_near():
                return True
            if host.now() - tried < _SLOW_SECONDS:
                return False
            if not said:
                say(
                    f"the attempt cannot begin yet: storage ({run.path}), or Slurm, does not respond on {host_name()}; "
                    f"waiting for up to {patience / 60:.0f} min"
                )
            said = True
            return unless()

        try:
            return host.within(max(_SLOW_SECONDS, began + patience - tried), do, unless=hangs)
        except (RunError, OSError) as error:
            cause = storage_error(error)
            lasts = patience if cause is not None and cause.errno in FULL_ERRORS else min(patience, PASSING_SECONDS)
            if cause is None or host.now() - began > lasts or unless():
                raise
            if not said:
                say(f"{error}; retrying for up to {lasts:.0f} s")
            said = True
            pause(_POLL_SECONDS)


def storage_error(error: Exception) -> OSError | None:
    """Return the error of storage that an error is, or comes from, and that may pass; None if there is none."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in (*FULL_ERRORS, *PASSING_ERRORS) else None
