"""How our processes end: without the interpreter's finalization, which takes long and may fail with all work done."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(status: int, *, at_once: bool = False) -> NoReturn:
    """End this process with this status, its output flushed.

    Taking hundreds of modules apart is a fifth of what a short command takes. And in a rank, threads of Gloo may still
    hold Python objects: one that wants Python's lock while the interpreter is being taken down aborts the process
    ("terminate called without an active exception").

    Parameters
    ----------
    at_once
        Whether threads and what was registered with `atexit` are passed over: they may wait for a network.
    """
    # What the interpreter does first when it ends; there is no public name for either.
    if status == 0 and not at_once:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; after a failure perhaps for ever
    if not at_once:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # nobody is left to read it, or the user's code has put another there
            stream.flush()
    os._exit(status)
