"""Reads what runs record, which may be foreign, damaged, of a different version, or just being written.

Only regular files are read, never through a link and never beyond the maximum length of their kind; a named pipe, a
device or a sparse file of terabytes is refused before a byte is read. Values have known types and ranges, so code that
computes with them or prints them needs no further checks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from cluster_ddp.run.errors import RunError
from cluster_ddp.run.storage import PASSING_ERRORS, open_without_links

MAX_RECORD = 1 << 20  # bytes of run.json, attempt.json and the stop file
MAX_LINES = 16 << 20  # bytes read from the end of a file of lines: the events of a hundred thousand checkpoints
_MAX_LINE = 1 << 20  # bytes of a line
_OBJECT_LINE = re.compile(rb"^[ \t]*\{[^\n]{4,%d}\}[ \t\r]*$" % _MAX_LINE, re.MULTILINE)  # at least `{"a":1}`
_LATEST = 253_370_764_800  # Unix seconds, the start of the year 9999: what the C library can convert to a date


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading without following links; return its descriptor and its size in bytes."""
    fd = open_without_links(path, os.O_RDONLY)
    return fd, os.fstat(fd).st_size


def read_file(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file; raises `OSError` if it has more than `limit`."""
    fd, size = open_regular(path)
    try:
        data = _read(fd, size, limit + 1) if size <= limit else b""
    finally:
        os.close(fd)
    if size > limit or len(data) > limit:
        raise OSError(errno.EFBIG, f"is larger than the {limit} bytes that such a file can have", str(path))
    return data


def read_tail(path: Path, limit: int) -> bytes:
    """Return the whole lines in the last `limit` bytes of a regular file."""
    fd, size = open_regular(path)
    try:
        if size <= limit:
            return _read(fd, size, limit)
        os.lseek(fd, size - limit, os.SEEK_SET)
        return _read(fd, limit, limit).partition(b"\n")[2]
    finally:
        os.close(fd)


def read_on(path: Path, place: int, limit: int) -> tuple[bytes, int | None]:
    """Return what was appended to a file of lines since it was read up to `place`, and where that begins.

    The latter is None if no line ends at `place`, or the file is shorter: it is not the file that was read. If more
    than `limit` bytes were appended, only the last ones are read.
    """
    fd, size = open_regular(path)
    try:
        if size == place:
            return b"", place
        if size < place or (place and os.pread(fd, 1, place - 1) != b"\n"):
            return b"", None
        begin = max(place, size - limit)
        os.lseek(fd, begin, os.SEEK_SET)
        data = _read(fd, size - begin, limit)
    finally:
        os.close(fd)
    skipped = 0 if begin == place else data.find(b"\n") + 1
    return data[skipped:], begin + skipped


def _read(fd: int, expected: int, limit: int) -> bytes:
    """Return the bytes up to the end, at most `limit`; with a single system call if there are as many as expected."""
    data = os.read(fd, min(limit, expected + 1))
    while len(data) != expected and len(data) < limit and (piece := os.read(fd, min(limit - len(data), 1 << 20))):
        data += piece
    return data


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse lines of JSON and return the objects.

    Torn lines, damaged lines and lines that are not objects are skipped: the writer may have died, or be in the middle
    of a line.
    """
    lines = _OBJECT_LINE.findall(data)
    try:  # all at once, which takes a third of the time
        values = json.loads((b"[%s]" % b",".join(lines)).decode())
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):  # one of them is damaged
        values = [parse_object(line) for line in lines]
    return [value for value in values if isinstance(value, dict)]


def read_json_object(path: Path, *, strict: bool = False) -> dict[str, Any] | None:
    """Read the object in a JSON file no larger than a record; None if it is missing, damaged or something else.

    Parameters
    ----------
    strict
        Call `refuse_passing` if it cannot be read.
    """
    try:
        return parse_object(read_file(path, MAX_RECORD))
    except OSError as error:
        if strict:
            refuse_passing(path, error)
        return None


def refuse_passing(path: Path, error: OSError) -> None:
    """Raise `RunError` if storage fails in a way that may pass, for callers that decide what happens next."""
    if error.errno in PASSING_ERRORS:
        raise RunError(
            f"{path} cannot be read: {error.strerror}. If this persists, restore it: what happens next is decided from "
            "it"
        ) from error


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Parse `data` as a JSON object; None if it is not one."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def as_number(value: Any) -> float | None:
    """Return a number that can be computed with, as a float; None for anything else, including infinities and NaN."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if usable else None


def as_time(value: Any) -> float | None:
    """Return a time in Unix seconds, from 1970 to the year 9999; None for anything else."""
    moment = as_number(value)
    return moment if moment is not None and 0 <= moment < _LATEST else None


def as_whole(value: Any) -> int | None:
    """Return a step or a count: an integer from 0 to 2**63 - 1; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def as_size(value: Any) -> int | None:
    """Return a number of nodes, or of ranks per node: an integer from 1 to 2**16; None for anything else."""
    return value if type(value) is int and 0 < value <= 1 << 16 else None
