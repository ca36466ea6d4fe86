"""How our processes start: importing torch without the garbage collector, which would look through all of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Keep Python's garbage collector away from what is made in here, which stays to the end.

    Importing torch makes half a million objects. The collector would look at them again and again, to find nothing: a
    fifth to a third of the time that the imports take. The little that it would find costs 6 MiB.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
