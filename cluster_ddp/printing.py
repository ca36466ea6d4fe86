"""Safe printing of text that came from outside: names, errors, hosts, contents of files.

Anything that controls a terminal (escape sequences that set its clipboard or title, clear it or move the cursor), or
that changes how a line is displayed, is printed as a visible escape instead.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

# All control characters but line feed and tab; separators of lines; what changes the direction of writing, or is
# half of a character. C1 controls too: some terminals take U+009B for the beginning of an escape sequence.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` as it may be printed; its lines stay."""
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def one_line(text: str) -> str:
    """`text` as it may be printed within a line or a table."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"))


def say(text: str, stream: TextIO | None = None) -> None:
    """Print `text` for the user, on standard error unless another stream is given, if it can be printed.

    A closed terminal or a full disk is not a reason to exit.
    """
    pass_on(printable(text), stream or sys.stderr)


def pass_on(line: str, stream: TextIO) -> None:
    """Print a line of another program's output as it is, if it can be printed.

    Characters that the stream's encoding lacks become visible escapes: in a locale without UTF-8 nobody would read on
    what a program writes, until it waits for that.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"  # the user's code may have put another stream there
    with contextlib.suppress(OSError):
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


@contextlib.contextmanager
def say_if_slow(text: str, *, seconds: float = 10.0) -> Iterator[None]:
    """Print `text` for the user if the block takes longer than this: hanging storage can block a process forever."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


say_if_storage_is_slow = say_if_slow("cluster-ddp: waiting for the storage of the runs to answer")
"""Around where a command first touches the runs: it would wait without a word."""


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
