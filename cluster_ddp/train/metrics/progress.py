"""The progress display of rank 0: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from cluster_ddp.launch.variables import TERMINAL_VARIABLE
from cluster_ddp.printing import printable, say

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_DRAWINGS = 0.2


class Display(Protocol):
    """Something that shows the progress of training."""

    def update(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Show the latest numbers."""

    def say(self, text: str) -> None:
        """Show a line permanently."""

    def close(self) -> None:
        """Restore the terminal."""


def open_display(title: str, total_steps: int, step: int) -> Display:
    """A bar if the launcher names a terminal or standard output is one, else plain lines on standard output."""
    terminal = _terminal()
    if terminal is None:
        return Lines(total_steps)
    return Bar(terminal, title, total_steps, step)


def _terminal() -> IO[str] | None:
    path = os.environ.get(TERMINAL_VARIABLE)
    if path:
        try:
            return Path(path).open("w")
        except OSError:
            return None
    is_terminal = getattr(sys.stdout, "isatty", None)  # the user's code may have replaced it with its own writer
    return sys.stdout if is_terminal is not None and is_terminal() else None


def describe(values: Mapping[str, float], *, seconds_left: float | None) -> str:
    """The most important numbers, in one line."""
    parts = []
    if "train/loss" in values:
        parts.append(f"loss {values['train/loss']:.4f}")
    if "lr" in values:
        parts.append(f"lr {values['lr']:.3g}")
    if "samples_per_second" in values:
        parts.append(f"{values['samples_per_second']:,.0f} samples/s")
    parts += [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("val/")]
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Format as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Lines:
    """Prints a line every few seconds."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._next = 0.0

    def update(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now < self._next and step < self._total:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        left = values.get("seconds_per_step", 0.0) * (self._total - step)
        self.say(f"step {step}/{self._total}  epoch {epoch}  {describe(values, seconds_left=left)}")

    def say(self, text: str) -> None:
        say(text, sys.stdout)

    def close(self) -> None:
        pass


class _Terminal:
    """A terminal that may go away, as when a connection is lost: training continues, at least to its save."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Bar:
    """A rich progress bar. It is drawn when there is news, not by a thread, which would take time from training."""

    def __init__(self, terminal: IO[str], title: str, total_steps: int, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._terminal = terminal
        self._total = total_steps
        self._next = 0.0
        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=cast(IO[str], _Terminal(terminal)), force_terminal=True, highlight=False),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=step, text="")
        self._progress.start()

    def update(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now < self._next and step < self._total:
            return
        self._next = now + _SECONDS_BETWEEN_DRAWINGS
        left = values.get("seconds_per_step", 0.0) * (self._total - step)
        self._progress.update(self._task, completed=step, text=printable(describe(values, seconds_left=left)))
        self._progress.refresh()

    def say(self, text: str) -> None:
        self._progress.console.print(printable(text), markup=False)

    def close(self) -> None:
        self._progress.stop()
        if self._terminal is not sys.stdout:
            with contextlib.suppress(OSError):
                self._terminal.close()
