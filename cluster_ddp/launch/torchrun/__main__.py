"""``python -m cluster_ddp.launch.torchrun``: runs torchrun, with all its arguments.

Its agents sign their messages to each other and record how ranks end. It starts faster than torchrun itself: the ranks
start only after the agent has imported torch, so time saved here is saved at each resume.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster_ddp.launch.processes import do_nothing, existing_signals, survive
from cluster_ddp.launch.torchrun.command import option, script_set_apart, trains_a_task
from cluster_ddp.launch.torchrun.exits import record_exits
from cluster_ddp.launch.variables import ATTEMPT_VARIABLE, RUN_VARIABLE, SAFE_PATH_VARIABLE
from cluster_ddp.process import fast_exit, gc_paused
from cluster_ddp.run.directory import RunDirectory


class _ForTensorsWithoutData(ModuleType):
    """Stands for the module of torch that computes with tensors without data, a quarter of what an agent would import.

    An agent computes nothing. Whatever does use the module loads it.
    """

    def __init__(self) -> None:
        super().__init__("torch._meta_registrations")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for in any module
            raise AttributeError(name)
        del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def defer_computing() -> None:
    """Defer what an agent does not use of torch; call before torch is imported."""
    deferred = _ForTensorsWithoutData()
    sys.modules[deferred.__name__] = deferred


def handle_ignored_signals() -> None:
    """Survive the signals that this agent was started to ignore by handling them: its ranks inherit no handler.

    A script would pass on to what it starts that SIGTERM is ignored, and wait forever for what it has terminated, as
    at the end of ``with multiprocessing.Pool() as pool``.
    """
    by_python = existing_signals("SIGPIPE", "SIGXFSZ")  # restored in every process that it starts
    others = map(signal.Signals, signal.valid_signals() & set(signal.Signals) - set(by_python))
    survive(number for number in others if signal.getsignal(number) is signal.SIG_IGN)


def main() -> None:
    """Run torchrun in this process."""
    defer_computing()
    with gc_paused(freeze=True):
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing import api
        from torch.distributed.launcher.api import LaunchConfig

        from cluster_ddp.launch.torchrun.rendezvous import sign_rendezvous
    attempt = RunDirectory(Path(os.environ[RUN_VARIABLE])).attempt(int(os.environ[ATTEMPT_VARIABLE]))
    sign_rendezvous(sys.argv, attempt.rendezvous_key)
    on_sigterm: Any = signal.SIG_IGN
    if not trains_a_task(sys.argv):
        os.environ.pop(SAFE_PATH_VARIABLE, None)  # it can import the modules next to it, as when it is run directly
        sys.argv = script_set_apart(sys.argv)
        on_sigterm = do_nothing
        handle_ignored_signals()
    if not hasattr(LaunchConfig, "signals_to_handle"):  # older torch handles signals, whatever its environment says
        api._terminate_process_handler = on_sigterm
    record_exits(Path(option(sys.argv, "--log-dir")))
    run.main()
    fast_exit(0)


if __name__ == "__main__":
    main()
