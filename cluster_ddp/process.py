"""How our processes start and end: imports without garbage collection, exit without finalization."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

_FLUSH_SECONDS = 5.0
_THREADS_SECONDS = 2.0  # for threads after a failure: one of them may be what has failed
_status: int | None = None  # that `fast_exit` was called with


@contextlib.contextmanager
def gc_paused(*, freeze: bool = False) -> Iterator[None]:
    """Collect no garbage during the block.

    Parameters
    ----------
    freeze
        For a block that imports torch, which makes half a million objects: never search those again. The collector
        would search them again and again and find nothing, a fifth to a third of the time that the imports take. The
        little garbage among them that stays costs 6 MiB.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


def limit_umask(run: Path | None = None) -> None:
    """Make the files of this process writable only by the owner, or in a group-writable run by its group.

    With a umask of 000, as in some containers and shells, anybody could change a run's logs and folders.
    """
    shared = False
    if run is not None:
        with contextlib.suppress(OSError):
            shared = bool(run.stat().st_mode & stat.S_IWGRP)
    inherited = os.umask(0o077)
    os.umask((inherited | 0o022) & (~0o070 if shared else ~0))


def host_name() -> str:
    """The name of this host; inside a Slurm job, Slurm's name for it, the only one that its commands accept."""
    import socket  # not for a dry run

    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def fast_exit(status: int, *, at_once: bool = False) -> NoReturn:
    """End this process with this status, its output flushed, without taking the interpreter down.

    Tearing down hundreds of modules is a fifth of the time that a short command takes. And in a rank, threads of Gloo
    may still hold Python objects: one that wants Python's lock while the interpreter is being taken down aborts the
    process ("terminate called without an active exception").

    Threads are waited for, after a failure for a few seconds only, and what was registered with `atexit` is called.

    Parameters
    ----------
    at_once
        Skip both, and do not wait long for the output: they may be waiting for a network or for shared storage.
    """
    global _status
    if at_once:
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            flushing = threading.Thread(target=_flush, daemon=True)
            flushing.start()
            flushing.join(_FLUSH_SECONDS)
        os._exit(status)
    _status = status
    if status:
        limit = threading.Timer(_THREADS_SECONDS, _end, (status,))
        limit.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            limit.start()
        atexit.register(limit.cancel)  # called first, when the threads have ended
    sys.exit(status)


def _end(status: int) -> NoReturn:
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # nobody is left to read it, or the user's code has put another there
            stream.flush()


@atexit.register
def _end_if_asked() -> None:
    """Registered first and therefore called last: only the teardown of the interpreter is left."""
    if _status is not None:
        _end(_status)
