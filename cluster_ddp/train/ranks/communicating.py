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
        self._kept: dict[str, Any] = {}
        self._new_group: Callable[..., Any] | None = None
        self._wrap: Callable[..., None] | None = None

    def __enter__(self) -> Alone:
        if dist.is_initialized():
            # torch has no hook for it. Every function of torch.distributed ends in one of these methods.
            methods = vars(dist.ProcessGroup).items()
            self._kept = {name: own for name, own in methods if name.lstrip("_").startswith(_COLLECTIVES)}
            for name in self._kept:
                setattr(dist.ProcessGroup, name, self._instead(name))
            self._new_group = getattr(dist.distributed_c10d, _NEW_GROUP, None)  # which waits for all ranks, too
            if self._new_group is not None:
                setattr(dist.distributed_c10d, _NEW_GROUP, self._refuse_group)
            self._wrap = DistributedDataParallel.__init__  # whose collectives are compiled
            DistributedDataParallel.__init__ = self._instead_of_wrapping()  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for name, own in self._kept.items():
            setattr(dist.ProcessGroup, name, own)
        if self._new_group is not None:
            setattr(dist.distributed_c10d, _NEW_GROUP, self._new_group)
        if self._wrap is not None:
            DistributedDataParallel.__init__ = self._wrap  # type: ignore[method-assign]

    def _refuse_group(self, *arguments: Any, **named: Any) -> Any:
        self._refuse_unless(dist.get_world_size() == 1)
        assert self._new_group is not None
        return self._new_group(*arguments, **named)

    def _instead_of_wrapping(self) -> Any:
        def wrap(model: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
            self._refuse_unless(dist.get_world_size() == 1)
            assert self._wrap is not None
            self._wrap(model, *arguments, **named)

        return wrap

    def _instead(self, name: str) -> Any:
        def collective(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
            self._refuse_unless(group.size() == 1)
            return self._kept[name].__get__(group)(*arguments, **named)

        return collective

    def _refuse_unless(self, is_single: bool) -> None:
        if not is_single and threading.get_ident() == self._thread:
            self.has_tried = True
            raise TaskError(self._message)


def _collectives() -> int:
    """How many the default group has begun so far."""
    if not dist.is_initialized():
        return 0
    group: Any = dist.distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError):  # a backend that does not count them
        return sum(group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types)
    return 0
