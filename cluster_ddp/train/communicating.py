"""Notes whether a task's methods communicate between the ranks: one that calls them alone would wait for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class Communicating:
    """Whether any of the calls `watched` so far has begun a collective, such as a barrier in model().

    Attributes
    ----------
    is_seen
        The same on all ranks, because all of them take part in a collective.
    """

    def __init__(self) -> None:
        self.is_seen = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what is called in the block; nothing else may communicate meanwhile."""
        before = _collectives()
        yield
        self.is_seen |= _collectives() != before


def _collectives() -> int:
    """How many the default group has begun so far."""
    if not dist.is_initialized():
        return 0
    group: Any = dist.distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError):  # a backend that does not count them
        return sum(group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types)
    return 0
