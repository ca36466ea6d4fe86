"""What is typed and shown in a terminal: ``status --watch``, and the completion of the shell; in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_ddp.job import JobSpec
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import STARTED, EventWriter
from cluster_ddp.run.runs import create_run

PATIENCE = 120.0
ENTER, LEAVE, HOME = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H"
PROJECT = Path(__file__).parents[2]


class Terminal:
    """A terminal of so many columns and lines, with a program in it."""

    def __init__(self, program: list[str], here: Path, *, columns: int, lines: int) -> None:
        self.shown = ""
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            foreign = ("COLUMNS", "LINES", "PYTHONUNBUFFERED")
            environment = {name: value for name, value in os.environ.items() if name not in foreign}
            os.chdir(here)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
            os.execvpe(program[0], program, environment | {"TERM": "xterm", "PYTHONPATH": str(PROJECT)})
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, there: Callable[[str], bool]) -> str:
        """Read until something is shown; what was shown since the last such call."""
        deadline = time.monotonic() + PATIENCE
        while not there(self.shown):
            assert time.monotonic() < deadline and self._read(), self.shown
        shown, self.shown = self.shown, ""
        return shown

    def rest(self) -> tuple[str, int]:
        """What is shown until the program ends, and its exit status."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return self.shown, os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._end)

    def _read(self) -> bool:
        """Whether the program may still say something."""
        ready, _, _ = select.select([self._end], [], [], PATIENCE)
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            data = os.read(self._end, 1 << 16) if ready else b""
            self.shown += data.decode()
            return bool(data)
        return False


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(here: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def open_one(*program: str, columns: int = 80, lines: int = 24) -> Terminal:
        opened.append(Terminal(list(program), here, columns=columns, lines=lines))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """A run that is alive as long as this process is."""
    made = create_run(
        JobSpec(name="small", task="cluster_ddp.tasks.digits:Digits", train={"steps": 20}),
        runs_dir=here / "runs",
        via="local",
        script=None,
    )
    begin_attempt(made, host=os.uname().nodename, pid=os.getpid(), nodes=1, procs=1)
    EventWriter(made, "rank-0").write(STARTED, attempt=0, step=0, total_steps=20)
    return made


def frames(shown: str) -> list[list[str]]:
    """The rows of each picture; what stood there before is written over, and cleared below."""
    return [frame.removesuffix("\r\n\x1b[J").split("\r\n") for frame in shown.split(HOME)[1:]]


WATCH = (sys.executable, "-m", "cluster_ddp", "status", "--watch")


def test_watching_draws_in_place_and_leaves_the_terminal_as_it_was(terminal: Open, run: RunDirectory) -> None:
    screen = terminal(*WATCH, run.id, columns=30, lines=8)
    shown = screen.wait_for(lambda text: "more lines" in text)
    assert shown.startswith(ENTER) and "\x1b[2J" not in shown
    ((*rows, last),) = frames(shown)
    assert {len(row) for row in rows} == {30} and len(rows) == 7
    assert "  directory " not in "".join(rows) and re.match(r"\(\d+ more lines", last)
    assert "".join(row for row in rows if not row.startswith("  ")).startswith(run.id)
    screen.resize(100, 30)
    (rows, *_) = frames(screen.wait_for(lambda text: "\x1b[J" in text))
    assert "  state            RUNNING".ljust(100) in rows and f"  directory        {run.path}"[:40] in "\n".join(rows)
    screen.type("\x1a")  # Ctrl-Z: as behind `ssh -t`, there is no shell that could continue it
    screen.wait_for(lambda text: "RUNNING" in text.partition(LEAVE + ENTER)[2])
    screen.type("\x03")
    shown, status = screen.rest()
    _, left, then = shown.rpartition(LEAVE)
    assert (left, status) == (LEAVE, 0) and "RUNNING" in then, "what was seen last stays in view"
    assert "\x1b" not in then


def test_ctrl_z_gives_the_terminal_to_the_shell_until_fg(terminal: Open, run: RunDirectory) -> None:
    shell = terminal("bash", "--norc", "--noprofile", "-i", columns=200)
    shell.type(f"{shlex.join(WATCH)}\r")
    shell.wait_for(lambda text: "RUNNING" in text)
    shell.type("\x1a")
    shell.wait_for(lambda text: "Stopped" in text.partition(LEAVE)[2])
    shell.type("fg\r")
    shell.wait_for(lambda text: "RUNNING" in text.partition(ENTER)[2])
    shell.type("\x03")
    shell.wait_for(lambda text: "RUNNING" in text.partition(LEAVE)[2])


DRAWN_WHEN_IT_IS_TYPED = """
import io, os, signal, sys
from cluster_ddp.cli.screen import alternate_screen, draw

class Terminal(io.FileIO):
    def write(self, data):
        if b"first" in bytes(data):
            os.kill(os.getpid(), signal.SIGTSTP)
        return super().write(data)

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Terminal(1, "w", closefd=False)))
with alternate_screen():
    draw(["first"])
    draw(["second"])
"""


def test_ctrl_z_may_come_while_a_picture_is_written(terminal: Open) -> None:
    shown, status = terminal(sys.executable, "-c", DRAWN_WHEN_IT_IS_TYPED).rest()
    assert status == 0, shown
    assert shown.index(LEAVE + ENTER) < shown.index("first") < shown.index("second")


def test_who_ends_the_watching_gets_the_terminal_back(terminal: Open, run: RunDirectory) -> None:
    screen = terminal(*WATCH)
    screen.wait_for(lambda text: "RUNNING" in text)
    os.kill(screen.pid, signal.SIGTERM)
    shown, status = screen.rest()
    assert LEAVE in shown and status == 128 + signal.SIGTERM


def test_bash_completes_what_is_typed(terminal: Open, run: RunDirectory, tmp_path: Path) -> None:
    shell = terminal("bash", "--norc", "--noprofile", "-i", columns=200)
    shell.type(f"PATH={Path(sys.executable).parent}:$PATH PS1='> '; bind 'set enable-bracketed-paste off'\r")
    shell.type(f'export HOME={tmp_path}; cluster-ddp --install-completion; . ~/.bashrc; echo rea""dy\r')
    shell.wait_for(lambda text: "ready" in text)
    shell.type("cluster-ddp sta\t")
    shell.wait_for(lambda text: "cluster-ddp status " in text)
    shell.type("sma\t")
    shell.wait_for(lambda text: run.id in text)
