"""Notes whether a task's methods communicate between the ranks: one that calls them alone would wait for the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.errors import TaskError

# What the names of collectives begin with.
_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored_barrier", "reduce", "scatter")
_NEW_GROUP = "_new_group_with_tag"
IN_PREPARE = (
    "prepare() communicates between the ranks, but only one rank of each node calls it, and would wait for the others "
    "forever: leave out a barrier, since no rank goes on until prepare() has ended on all nodes; what all ranks do "
    "together belongs in train_data()"
)
IN_CHECKS = (
    "state_dict() or load_state_dict() of what is passed in communicates between the ranks, but rank 0 calls them "
    "alone for checks: let all ranks exchange in a step what is needed, and let state_dict() return it"
)

IN_EVALUATE = (
    "evaluate() communicates between the ranks, but not all of them have a batch left: the others would never take "
    "part in it. Let it return one value per sample, which are averaged over all ranks, without communicating; or let "
    "eval_data() return a multiple of (ranks x samples per batch)"
)


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


class Alone:
    """Raises a `TaskError`, within its block, where this thread begins a collective, in which it would wait forever.

    Parameters
    ----------
    message
        What to raise.

    Attributes
    ----------
    has_tried
        Whether a collective was to begin, even if the error was caught.
    """

    def __init__(self, message: str) -> None:
        self.has_tried = False
        self._message = message
        self._thread = threading.get_ident()
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Alone:
        if dist.is_initialized():
            # torch has no hook for it. Every function of torch.distributed ends in one of these methods.
            for name, own in list(vars(dist.ProcessGroup).items()):
                if name.lstrip("_").startswith(_COLLECTIVES):
                    self._refuse(dist.ProcessGroup, name, own, dist.ProcessGroup.size)
            # These wait for all ranks, too, in compiled code.
            for place, name in (dist.distributed_c10d, _NEW_GROUP), (DistributedDataParallel, "__init__"):
                if (own := getattr(place, name, None)) is not None:
                    self._refuse(place, name, own, lambda *_: dist.get_world_size())
        return self

    def __exit__(self, *_: object) -> None:
        for place, name, own in self._kept:
            setattr(place, name, own)

    def _refuse(self, place: Any, name: str, own: Any, ranks: Callable[[Any], int]) -> None:
        def collective(first: Any, *arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == self._thread and ranks(first) > 1:
                self.has_tried = True
                raise TaskError(self._message)
            return own(first, *arguments, **named)

        self._kept.append((place, name, own))
        setattr(place, name, collective)


def _collectives() -> int:
    """How many the default group has begun so far."""
    if not dist.is_initialized():
        return 0
    group: Any = dist.distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError):  # a backend that does not count them
        return sum(group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types)
    return 0
