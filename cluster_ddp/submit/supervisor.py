"""Runs the node programs of one start on this machine, and handles the user's signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TextIO

from cluster_ddp.launch.keeper.job_step import node_program
from cluster_ddp.launch.node.reaper import SAVE_SECONDS
from cluster_ddp.launch.processes import ASK_TO_STOP, die_with_parent, is_stopped
from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE, TERMINAL_VARIABLE
from cluster_ddp.printing import say
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import NODE_FAILED, EventWriter, login_writer
from cluster_ddp.run.stopfile import AGENT_LOST, AT_ONCE, PERSON, SAVE_AND_END, TERMINATED, request_stop
from cluster_ddp.run.storage import open_append

POLL_SECONDS = 0.2
_STOPPED_LOOKS = 25  # and not seconds, in which this process may have been stopped too
# When one node has failed, the others notice as their collectives fail; if they do not, they are ended.
_OTHERS_SECONDS = 10.0
_OTHERS_GRACE = 20.0
_LEFT_BEHIND_SECONDS = SAVE_SECONDS + 2.0  # for the ranks of a killed node program to save, or to be ended
_ANSWERS = (
    "saving a checkpoint, then exiting (once more: save at once)",
    "saving at once, then exiting (once more: exit without saving)",
    "exiting without saving",
)


@contextlib.contextmanager
def noting_stops(signals: list[signal.Signals]) -> Iterator[None]:
    """Append to a list the signals to stop that come in the block, such as Ctrl-C.

    SIGHUP is not one of them if it is ignored: with nohup, training outlives its terminal.
    """

    def note(number: int, _frame: object) -> None:
        signals.append(signal.Signals(number))

    before = {
        number: signal.signal(number, note)
        for number in ASK_TO_STOP
        if number.name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Start(Protocol):
    """What the supervisor needs to know about a start."""

    @property
    def python(self) -> str:
        """The interpreter of the node programs and their ranks."""

    @property
    def nodes_here(self) -> Sequence[int]:
        """The ranks of the nodes that run on this machine."""

    def torchrun(self, run_directory: str, attempt: int) -> list[str]:
        """Return the torchrun command line with its placeholders, as the node programs get it."""

    def variables(self, node: int) -> dict[str, str]:
        """Return the variables set for one node in addition to this process's environment."""


class Supervisor:
    """Runs the node programs that an attempt has on this machine, and passes on the user's requests to stop.

    The first Ctrl-C, or other signal to stop, asks to save and end, the second to save immediately, the third ends it.

    Parameters
    ----------
    others_have_ended
        Whether the nodes of the attempt on other machines have ended; asked once those here have.
    signals
        What `noting_stops` has noted since before the attempt began.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        start: Start,
        *,
        show: TextIO,
        others_have_ended: Callable[[], bool] = lambda: True,
        signals: list[signal.Signals] | None = None,
    ) -> None:
        self._attempt = attempt
        self._start = start
        self._show = show
        self._others_have_ended = others_have_ended
        self._signals = [] if signals is None else signals
        self._asked = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._failed_at: float | None = None
        self._stopped_looks = 0

    def run(self) -> None:
        """Start the node programs and wait until the last of them has ended, here and on other machines."""
        with noting_stops(self._signals):
            self._children = [self.start_node(node) for node in self._start.nodes_here]
            while any(child.poll() is None for child in self._children) or not self._others_have_ended():
                self._pass_on()
                self._look_after()
                self._tell_of_stopped()
                time.sleep(POLL_SECONDS)
        self._record_killed()

    def _record_killed(self) -> None:
        """Record the node programs that a signal has ended, as soon as what they have left behind has ended."""
        nodes = zip(self._start.nodes_here, self._children, strict=True)
        killed = {node: signal.Signals(-child.returncode).name for node, child in nodes if child.returncode < 0}
        if not killed or self._asked:
            return
        time.sleep(_LEFT_BEHIND_SECONDS)
        writer, host = EventWriter(self._attempt.run, login_writer()), host_name()
        for node, how in killed.items():
            error = f"its node program was killed from outside, for example because memory ran out ({how})"
            writer.write(NODE_FAILED, attempt=self._attempt.number, node=node, host=host, error=error, suspect=True)

    def start_node(self, node: int) -> subprocess.Popen[bytes]:
        """Start the program of one node."""
        run = str(self._attempt.run.path)
        number = self._attempt.number
        parent = os.getpid()
        torchrun = self._start.torchrun(run, number)
        with os.fdopen(open_append(self._attempt.log_file(node)), "ab") as log:
            return subprocess.Popen(
                node_program(self._start.python, run, torchrun, attempt=str(number), node=node),
                env=self._environment(node),
                stdin=subprocess.DEVNULL,
                stdout=self._show.fileno(),
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the supervisor
                preexec_fn=lambda: die_with_parent(parent),
            )

    def _environment(self, node: int) -> dict[str, str]:
        # This may be a shell inside an allocation: its Slurm variables do not describe these nodes.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        terminal = {TERMINAL_VARIABLE: os.ttyname(self._show.fileno())} if self._show.isatty() else {}
        return {**inherited, **self._start.variables(node), **terminal, SAFE_PATH_VARIABLE: "1"}

    def _pass_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._asked += 1
            by = "Ctrl-C" if number is signal.SIGINT else number.name
            reason = PERSON if number is signal.SIGINT else TERMINATED
            level = SAVE_AND_END if self._asked == 1 else AT_ONCE
            self._ask(reason, level, 0.0 if self._asked > 2 else None, by)
            say(f"\n{by}: {_ANSWERS[min(self._asked, len(_ANSWERS)) - 1]}")

    def _ask(self, reason: str, level: int, grace: float | None, by: str) -> None:
        """Ask all nodes to stop: with the stop file, or with a signal if that cannot be written."""
        try:
            request_stop(self._attempt, reason=reason, level=level, grace=grace, by=by)
        except OSError as error:
            say(f"\ncannot write {self._attempt.stop_file} ({error.strerror}): the nodes are signalled instead")
            for child in self._children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM if grace is None else signal.SIGKILL)

    def _look_after(self) -> None:
        """End the other nodes if one has failed and they do not notice."""
        now = time.monotonic()
        if self._failed_at is None and any(child.poll() for child in self._children):
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > _OTHERS_SECONDS:
            self._failed_at = float("inf")
            with contextlib.suppress(OSError):
                request_stop(self._attempt, reason=AGENT_LOST, level=AT_ONCE, grace=_OTHERS_GRACE, by="the supervisor")

    def _tell_of_stopped(self) -> None:
        """Name node programs that do not run on, for which this process would wait without a word."""
        stopped = [str(child.pid) for child in self._children if is_stopped(child.pid)]
        self._stopped_looks = self._stopped_looks + 1 if stopped else 0
        if self._stopped_looks == _STOPPED_LOOKS:
            say(f"\na signal (SIGSTOP) has stopped a node program; it continues after: kill -CONT {' '.join(stopped)}")
