"""torchrun's agent, as a child of the node program.

Slurm may send a signal to every process of a step. The agent must survive it, or its ranks could not save:

- It is started with those signals ignored. torchrun installs handlers for some, so it is configured to handle only one
that nobody sends (``PET_SIGNALS_TO_HANDLE``, torch >= 2.9; `__main__` replaces an older one's handler).
- Ignored signals are inherited: a rank of a task ignores them too until it installs its own handlers. A script starts
with default handling, as under torchrun alone (`__main__`): what it starts itself must end on ``terminate()``.

It runs in its own session, which Ctrl-C at a terminal does not reach, and the kernel ends it with the node program.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster_ddp.launch.processes import ASK_TO_STOP, die_with_parent, existing_signals
from cluster_ddp.run.storage import open_append

SURVIVED = (*ASK_TO_STOP, *existing_signals("SIGQUIT"))


class Agent:
    """A running torchrun, from a command without placeholders, which the signals in `survives` do not end."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, survives: Iterable[signal.Signals]
    ) -> None:
        parent = os.getpid()
        ignored = tuple(survives)

        def prepare() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            die_with_parent(parent)

        with os.fdopen(open_append(log), "ab") as out:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status: None while it runs, 0 or 1 whatever the ranks returned, negative if it was killed."""
        return self._process.poll()
