"""torchrun's agent as a child of the node program.

Slurm may send a signal to every process of a step. The agent must not end on it, or its ranks would not get to save:

- it is started with those signals ignored. torchrun replaces that for the signals that it handles, so it is told to
  handle only one that nobody sends (``PET_SIGNALS_TO_HANDLE``, torch >= 2.9; an older agent that gets SIGTERM gives
  its ranks 30 s).
- ignored signals are inherited: a rank ignores them too until it installs handlers of its own.

It is a session of its own, which Ctrl-C at a terminal does not reach, and the kernel ends it with the node program.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.launch.processes import die_with_parent
from cluster_ddp.launch.relay import Tail

SURVIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# What torchrun says of ranks that failed: of the first of them in one line, and of all in the summary at its end.
_FIRST_FAILURE = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
_CLOSING = re.compile(r"Sending process (?P<pid>\d+) closing signal")
_SUMMARY_RANK = re.compile(r"^\s+rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_SUMMARY_CODE = re.compile(r"^\s+exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, in torchrun's words: exit code, negative for a signal; its global rank where it says that."""

    pid: int
    code: int
    local_rank: int
    rank: int | None


class Agent:
    """A running torchrun.

    Parameters
    ----------
    command
        Without placeholders.
    log
        The file for what it prints.
    survives
        Signals that it and the ranks ignore from the start.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, survives: Iterable[signal.Signals]
    ) -> None:
        parent = os.getpid()
        ignored = tuple(survives)

        def prepare() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            die_with_parent(parent)

        with log.open("ab") as out:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self._tail = Tail(log)
        self._summary: tuple[int, int] | None = None  # rank and local rank that the next exit code belongs to
        self.exits: dict[int, RankExit] = {}
        self.ended: set[int] = set()  # ranks that it has told to end, because others failed

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs. 0 or 1 whatever the ranks returned, negative when it was killed."""
        return self._process.poll()

    def new_lines(self) -> list[str]:
        """What it printed since the last call. What that tells of ranks goes to `exits`, by process id."""
        lines = self._tail.lines(rest=self._process.poll() is not None)
        for line in lines:
            self._note(line)
        return lines

    def _note(self, line: str) -> None:
        if found := _FIRST_FAILURE.search(line):
            self._add(found, int(found["local"]), None)
        elif found := _CLOSING.search(line):
            self.ended.add(int(found["pid"]))
        elif found := _SUMMARY_RANK.match(line):
            self._summary = int(found["rank"]), int(found["local"])
        elif self._summary is not None and (found := _SUMMARY_CODE.match(line)):
            rank, local_rank = self._summary
            self._add(found, local_rank, rank)

    def _add(self, found: re.Match[str], local_rank: int, rank: int | None) -> None:
        pid = int(found["pid"])
        self.exits[pid] = RankExit(pid, int(found["code"]), local_rank, rank)
