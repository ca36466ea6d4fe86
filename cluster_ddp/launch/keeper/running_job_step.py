"""The running job step: srun with a node program on every node, from its start to its end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.launch.keeper.job_step_output import LABEL, JobStepOutput
from cluster_ddp.launch.processes import die_with_parent, is_stopped
from cluster_ddp.launch.sign_of_life import SILENT_SECONDS, SilentNodes
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.stopfile import read_stop

START_SECONDS = 3600.0
"""For the first node program to come up: a container's image may have to be fetched before."""
_TERM_SECONDS = 5.0


class RunningJobStep:
    """A running step, whose output is passed on.

    Parameters
    ----------
    command
        srun, or the node program if there is no Slurm.
    nodes
        How many node programs it runs.
    parent
        This process, with which the step ends: an srun left behind could cancel the step of the job's next start.

    Attributes
    ----------
    output
        What it printed.
    lost
        The ranks of the nodes that stopped giving signs of life, because of which it was ended.
    unstarted
        Whether it was ended because no node program had come up in time.
    stood_still
        Whether that was because somebody had stopped srun.

    Raises
    ------
    OSError
        It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, nodes: int, parent: int
    ) -> None:
        def prepare() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the keeper may be ignoring it by now
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
        self.output = JobStepOutput(labelled=LABEL in options)
        for pipe, stream in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)):
            assert pipe is not None
            self.output.follow(pipe, stream)
        self._attempt = attempt
        self._silent = SilentNodes(attempt, nodes)
        self._began = time.monotonic()
        self._stopped: float | None = None
        self.lost: list[int] = []
        self.unstarted = False
        self.stood_still = False
        self._stands_still_since: float | None = None
        self._ended_here = False

    @property
    def killed_by(self) -> str | None:
        """The signal that ended srun itself, such as SIGKILL; None if none did, or if this process ended it."""
        status = self._process.poll()
        return signal.Signals(-status).name if status is not None and status < 0 and not self._ended_here else None

    @property
    def has_exited(self) -> bool:
        """Whether srun has ended, though storage may not let `has_ended` return."""
        return self._process.poll() is not None

    @property
    def cancelled(self) -> bool:
        """Whether it was ended from outside before any of its tasks had ended, and not by this process."""
        return self.output.cancelled and not self._ended_here

    def has_ended(self) -> bool:
        """Whether it is over. A step that waits for a node that died silently is ended here.

        So is a step whose node programs have all signed off: srun is then only waiting for Slurm's controller. And so
        is one in which none has come up: Slurm may hold the step until a different one ends, and Python may be waiting
        for its disk.
        """
        if self._process.poll() is None and not self.lost:
            self.lost = self._silent.look()
            if self.lost or self._silent.all_signed_off or self._was_stopped():
                self._end()
            else:
                self.end_unbegun()
        if self._process.poll() is None:
            return False
        self.output.finish()
        return True

    def end_unbegun(self) -> bool:
        """End it if no node program has come up for too long, also while storage does not let `has_ended` return.

        Returns whether it was ended because of that.
        """
        if self.has_exited or self._silent.any_began:
            return False
        self.stood_still = self._stands_still()
        if not self.stood_still and time.monotonic() - self._began <= START_SECONDS:
            return False
        self.unstarted = True
        self._end()
        return True

    def _stands_still(self) -> bool:
        """Whether a signal has stopped srun for a while, though not this process, as if Slurm suspended the job."""
        if not is_stopped(self._process.pid):
            self._stands_still_since = None
            return False
        now = time.monotonic()
        if self._stands_still_since is None:
            self._stands_still_since = now
        return now - self._stands_still_since > SILENT_SECONDS

    def _was_stopped(self) -> bool:
        """Whether it was stopped before any node program had come up, so that none will notice."""
        if self._silent.any_began:
            return False
        now = time.monotonic()
        if self._stopped is None and read_stop(self._attempt) is not None:
            self._stopped = now
        return self._stopped is not None and now - self._stopped > SILENT_SECONDS

    def _end(self) -> None:
        self._ended_here = True
        self._process.terminate()  # srun cancels what is left of the step
        self._process.send_signal(signal.SIGCONT)  # one that somebody has stopped learns of it only then
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_SECONDS)
            return
        self._process.kill()
        self._process.wait()
