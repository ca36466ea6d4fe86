"""The running job step: srun with a node program on every node, from its start to its end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from cluster_ddp.launch.processes import die_with_parent
from cluster_ddp.launch.sign_of_life import SilentNodes
from cluster_ddp.launch.step_output import LABEL, StepOutput
from cluster_ddp.run.directory import AttemptDirectory

_TERM_SECONDS = 5.0


class RunningStep:
    """A step that runs. What it prints is passed on.

    Parameters
    ----------
    command
        srun, or the node program where there is no Slurm.
    nodes
        How many node programs it runs.
    parent
        This process, with which the step ends: an srun left behind may cancel the step of the job's next start.

    Attributes
    ----------
    output
        What it printed.
    lost
        The ranks of the nodes that it was ended for, since they gave no sign of life any more.

    Raises
    ------
    OSError
        It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, nodes: int, parent: int
    ) -> None:
        def prepare() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the keeper may ignore it by now
            die_with_parent(parent)

        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,
        )
        options = list(command[: command.index("-m")]) if "-m" in command else []
        self.output = StepOutput(labelled=LABEL in options)
        for pipe, stream in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)):
            assert pipe is not None
            self.output.follow(pipe, stream)
        self._silent = SilentNodes(attempt, nodes)
        self.lost: list[int] = []

    def has_ended(self) -> bool:
        """Whether it is over. One that waits for a node that has died without a word is ended here.

        So is one whose node programs have all signed off: srun then waits for nothing but Slurm's controller.
        """
        if self._process.poll() is None and not self.lost:
            self.lost = self._silent.look()
            if self.lost or self._silent.all_signed_off:
                self._end()
        if self._process.poll() is None:
            return False
        self.output.finish()
        return True

    def _end(self) -> None:
        self._process.terminate()  # srun cancels what is left of the step
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_SECONDS)
            return
        self._process.kill()
        self._process.wait()
