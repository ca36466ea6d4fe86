"""Finds out how samples would be in another worker of the same loader."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

from torch.utils.data import get_worker_info


@contextlib.contextmanager
def as_another_worker() -> Iterator[None]:
    """Make `get_worker_info` describe another worker of this loader; there is no public API for it."""
    place, info = sys.modules[get_worker_info.__module__], get_worker_info()
    assert info is not None
    other = dataclasses.replace(info, id=(info.id + 1) % info.num_workers, seed=info.seed + 1)
    vars(place)["_worker_info"] = other
    try:
        yield
    finally:
        vars(place)["_worker_info"] = info
