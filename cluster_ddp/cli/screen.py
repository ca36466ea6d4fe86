"""Showing one screenful after the other in the same place on a terminal, as `top` and `watch` do."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

# The sequences that all terminals of today know. The alternate screen leaves what stood on the other one as it was.
_ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, and no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_CLEAR_BELOW = "\x1b[J"


def is_screen() -> bool:
    """Whether standard output is a terminal on which a text can replace another."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def draw(lines: Sequence[str]) -> None:
    """Replace the lines shown before with these, as many as fit; long ones are wrapped.

    Nothing is cleared before it is overwritten, and everything is written at once, so that nothing flickers.
    """
    width, height = shutil.get_terminal_size()
    rows = [row for line in lines for row in _rows(line, width)]
    if len(rows) > height:
        rest = f"({len(rows) - height + 1} more lines; without --watch all are shown)"
        rows = [*rows[: height - 1], rest[:width].ljust(width)]
    # Behind a full row the cursor still stands on its last character, which clearing from there would take away.
    sys.stdout.write(_HOME + "\n".join(rows) + (f"\n{_CLEAR_BELOW}" if len(rows) < height else ""))
    sys.stdout.flush()


@contextlib.contextmanager
def alternate_screen() -> Iterator[None]:
    """Draw on the terminal's alternate screen; afterwards, however it ends, the terminal is as it was.

    That holds while the process is stopped by Ctrl-Z, too.
    """
    handlers = {signal.SIGTERM: _end, signal.SIGHUP: _end, signal.SIGTSTP: _pause}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    _write(_ENTER)
    try:
        yield
    finally:
        _write(_LEAVE)
        for number, handler in before.items():
            signal.signal(number, handler)


def _rows(line: str, width: int) -> list[str]:
    """A line as the rows that a terminal shows it in: several on a narrow one."""
    if line.isascii() and len(line) <= width:
        return [line.ljust(width)]
    from rich.cells import chop_cells, set_cell_size

    return [set_cell_size(row, width) for row in chop_cells(line, width)]


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _pause(number: int, _: FrameType | None) -> None:
    """Stop as if the signal were not handled: with no shell that could continue the process, the kernel ignores it."""
    _write_in_handler(_LEAVE)
    handler = signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)  # here it waits for `fg`
    signal.signal(number, handler)
    _write_in_handler(_ENTER)


def _write_in_handler(sequence: str) -> None:
    """Write past `sys.stdout`: the signal may have come while that writes, and then it takes no second call."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), sequence.encode())


def _write(sequence: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stdout.write(sequence)
        sys.stdout.flush()
