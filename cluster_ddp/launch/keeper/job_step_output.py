"""Passes on what a job step prints, and remembers what explains why a node did not come up.

srun labels each line with its task (``--label``), so that the output of a node that never wrote an event can be told
from that of the others. The labels are removed from what people see.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TextIO

from cluster_ddp.launch.torchrun.agent_failure import TOO_MANY_FILES
from cluster_ddp.printing import pass_on

LABEL = "--label"

_KEPT_LINES = 3
DRAIN_SECONDS = 2.0  # a process that was left behind may keep the pipe open
_LABELLED = re.compile(r" *(\d+): ?(.*)")
_EXIT = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+): (?P<how>.+)")
_OWN = re.compile(r"srun: (?:(?:error|fatal): |(?=(?:unrecognized|invalid|ambiguous) option ))(?P<what>.+)")
_CUT_OFF = re.compile(r"srun: error: .*aborting, io error with slurmstepd on node (\d+)")
_DOWN = re.compile(r"srun: error: Node failure on (?P<hosts>\S+)")
_ABORTED = "srun: Job step aborted"
_DAEMON = re.compile(r"slurmstepd\S*: ")
_CANCELLED = re.compile(r"slurmstepd\S*: error: \*{3} (JOB|STEP) ")  # a consequence of an earlier error
_SIGNALLED = ("Terminated", "Killed")  # what srun does to the other tasks once one has failed


@dataclass(frozen=True)
class TaskExit:
    """How the task of one host ended, according to srun."""

    host: str
    how: str  # in srun's words, such as ``Exited with exit code 2``
    last_line: str  # the last line that the task printed; empty if it printed nothing

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended the task."""
        return not self.how.startswith(("Exited with exit code", "the task was not launched"))

    def describe(self) -> str:
        """Describe it in one line for people."""
        return f"{self.how}: {self.last_line}" if self.last_line else self.how


class JobStepOutput:
    """Passes on the output of a running step.

    Attributes
    ----------
    own_error
        The first error that srun reported about itself rather than a task; None if there was none. A lack of open
        files takes precedence: other errors of srun, such as one of authentication, may come from it.
    cut_off
        The index of the node to which srun lost its connection, and ended the step because of that; None if it did not.
    down
        The nodes that failed according to Slurm, or that a person has set DOWN.
    cancelled
        Whether the step was ended before any of its tasks: from outside, as by ``scancel JOB.STEP``.
    """

    def __init__(self, *, labelled: bool) -> None:
        self._labelled = labelled
        self._last: dict[str, deque[str]] = {}
        self._exits: list[tuple[str, str, str]] = []  # hosts, tasks, how
        self._threads: list[threading.Thread] = []
        self.own_error: str | None = None
        self.cut_off: int | None = None
        self.down: list[str] = []
        self.cancelled = False

    def follow(self, pipe: IO[bytes], stream: TextIO) -> None:
        """Pass on what comes through a pipe, in the background."""
        thread = threading.Thread(target=self._pass_on, args=(pipe, stream), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the remaining output, now that the step has ended; once, however often this is called."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, deadline - time.monotonic()))

    def failures(self) -> list[TaskExit]:
        """Return the tasks that failed by themselves, in srun's order, without those that srun ended as a result."""
        found = [
            TaskExit(host, how, self._last_line(task))
            for hosts, tasks, how in self._exits
            for host, task in zip(*_pairs(hosts, tasks), strict=False)
        ]
        return [failure for failure in found if not failure.how.startswith(_SIGNALLED)]

    def first_to_end(self) -> TaskExit | None:
        """Return the task that was first to end badly; None if srun names several at once, none, or was cancelled."""
        hosts, tasks, how = self._exits[0] if self._exits and not self.cancelled else ("", "", "")
        pairs = list(zip(*_pairs(hosts, tasks), strict=False))
        return TaskExit(pairs[0][0], how, self._last_line(pairs[0][1])) if len(pairs) == 1 and hosts else None

    def note(self, line: str) -> str:
        """Note a line; return what people should see of it."""
        if exited := _EXIT.match(line):
            self._exits.append((exited["hosts"], exited["tasks"], exited["how"]))
        elif refused := _NOT_LAUNCHED.match(line):
            self._exits.append((refused["host"], "", f"the task was not launched: {refused['how']}"))
        elif cut := _CUT_OFF.match(line):
            self.cut_off = int(cut[1])
        elif down := _DOWN.match(line):
            self.down += _pairs(down["hosts"], "")[0]
        elif own := _OWN.match(line):
            if self.own_error is None or TOO_MANY_FILES.search(own["what"]):
                self.own_error = own["what"]
        elif line.startswith(_ABORTED):
            self.cancelled = self.cancelled or not (
                self._exits or self.own_error or self.down or self.cut_off is not None
            )
        elif self._labelled and (task := _LABELLED.fullmatch(line)):
            if task[2].strip() and not _CANCELLED.match(task[2]):
                self._last.setdefault(task[1], deque(maxlen=_KEPT_LINES)).append(task[2].strip())
            return task[2]
        return line

    def _pass_on(self, pipe: IO[bytes], stream: TextIO) -> None:
        for line in pipe:
            pass_on(self.note(line.decode(errors="replace").rstrip("\n")), stream)

    def _last_line(self, task: str) -> str:
        if not task:  # it was never launched
            return ""
        lines = self._last.get(task.lstrip("0") or "0") or self._last.get(task) or ()
        own = [line for line in lines if not _DAEMON.match(line)]
        return (own or list(lines) or [""])[-1]


def _pairs(hosts: str, tasks: str) -> tuple[list[str], list[str]]:
    """Pair the hosts and tasks that srun names together; several hosts only if it is clear which has which task."""
    from cluster_ddp.slurm.nodelist import NodeListError, expand

    try:
        names = expand(hosts)
        numbers = expand(f"[{tasks}]") if tasks else [""] * len(names)
    except (NodeListError, ImportError):
        return [hosts], [tasks]
    return names, numbers if len(numbers) == len(names) else [""] * len(names)
