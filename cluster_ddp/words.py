"""Times, sizes and lists in words, for people."""

from __future__ import annotations

import time
from collections.abc import Iterable


def moment(seconds: float) -> str:
    """A time in Unix seconds, in the local time zone, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def duration(seconds: float) -> str:
    """A number of seconds in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def listed(things: Iterable[object], shown: int = 5, between: str = ", ") -> str:
    """The first few of some things, and how many more there are."""
    names = [str(thing) for thing in things]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more
