"""Python's garbage collector, kept out of the way while a rank starts.

Importing torch makes about a million objects, and nearly all of them stay. Each full collection looks at all that there
are by then, to find nothing: a sixth of the time that the imports take. The small collections go on, so that memory
does not grow.
"""

from __future__ import annotations

import gc

_NEVER = 1_000_000
_DEFAULT = gc.get_threshold()


def put_off() -> None:
    """Do no full collections until `take_up`."""
    gc.set_threshold(*_DEFAULT[:2], _NEVER)


def take_up() -> None:
    """Collect as usual again, but never look at what is there now: it stays to the end."""
    gc.freeze()
    gc.set_threshold(*_DEFAULT)
