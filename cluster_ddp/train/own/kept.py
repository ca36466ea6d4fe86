"""The values a custom loop keeps in the checkpoint with ``run.keep``, besides the objects it passes in."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster_ddp.train.errors import TaskError, TrainError
from cluster_ddp.train.objects.packing import Packer, Unpacker
from cluster_ddp.train.own.values import tensors_in
from cluster_ddp.train.ranks.distributed import all_gather_object, find_world

_SHARED = (int, float, complex, str, bytes, type(None))


class Kept(SimpleNamespace):
    """The kept values, as attributes; returned by `ScriptRun.keep`."""


class KeptValues:
    """All values that the loop keeps with `ScriptRun.keep`, before or after the restore. Each rank has its own.

    Attributes
    ----------
    by_rank
        The values of all ranks when they were last gathered.
    in_place
        By rank, the names whose values were then still the objects the program had passed. After a resume these are
        restored in place into the objects passed then, because the program may refer to them by other names.
    """

    def __init__(self) -> None:
        self.by_rank: list[dict[str, Any]] = []
        self.in_place: list[list[str]] = []
        self._kept = Kept()
        self._given: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        self._restored_in_place: set[str] = set()

    @property
    def values(self) -> dict[str, Any]:
        """The current values, by name."""
        return vars(self._kept)

    def keeps(self, value: Any) -> bool:
        """Whether this very object is among the values; equal numbers and strings may be one object by chance."""
        return not isinstance(value, _SHARED) and any(value is kept for kept in self.values.values())

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the values."""
        return tensors_in(self.values)

    def add(self, initial: dict[str, Any]) -> Kept:
        """Keep these; restored values take precedence over the initial ones.

        Raises
        ------
        TrainError
            A value cannot be saved, or there is one of this name.
        """
        for name, value in initial.items():
            if name in self._given:
                raise TrainError(
                    f"run.keep({name}=...) is called again: each call gives the initial value, in the place of which a "
                    f"resume puts the saved one. Call it once, before the loop, and set kept.{name} in the loop"
                )
            _expect_that_it_can_be_kept(name, value)
            self._given[name] = self.values[name] = value
            self._put_back(name)
        return self._kept

    def watch(self) -> Iterator[None]:
        """Check after the first two steps that the values can be saved, rather than at the first save, much later.

        Raises
        ------
        TrainError
            A value cannot be saved.
        """
        for _ in range(2):
            for name, value in self.values.items():
                _expect_that_it_can_be_kept(name, value)
            yield

    def as_now(self) -> Callable[[], None]:
        """Take a snapshot; returns a function that restores it (values kept only later: as in the checkpoint)."""
        objects, now = dict(self.values), copy.deepcopy({**self._restored, **self.values})

        def put_back() -> None:
            for name, value in now.items():
                if name in self.values:
                    self.values[name] = _filled_deep(objects.get(name, self.values[name]), value)

        return put_back

    def gather(self) -> None:
        """Collect the values of all ranks before a save; all ranks call it.

        Restored values that the program has not asked for are retained.
        """
        values = {**self._restored, **self.values}
        if values:
            same = {name for name, given in self._given.items() if self.values.get(name) is given}
            in_place = sorted(same | self._restored_in_place - self.values.keys())
            tensors: dict[str, Tensor] = {}
            packed = Packer(tensors).pack(values, "run.keep")
            # Otherwise each would be unpickled onto the GPU of the rank that sent it.
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
            gathered = all_gather_object((packed, on_host, in_place))
            device = find_world().device
            self.by_rank = [Unpacker(device).unpack(found, of_rank.pop) for found, of_rank, _ in gathered]
            self.in_place = [names for _, _, names in gathered]

    def restore(self, by_rank: list[dict[str, Any]], in_place: list[list[str]]) -> None:
        """Restore what was gathered; after a change of the number of ranks, rank 0's values on all ranks."""
        self.by_rank, self.in_place = by_rank, in_place
        if not by_rank:
            return
        world = find_world()
        source = world.rank if len(by_rank) == world.world_size else 0
        self._restored = by_rank[source]
        self._restored_in_place = set(in_place[source]) if in_place else set()
        for name in list(self.values):
            self._put_back(name)

    def _put_back(self, name: str) -> None:
        if name in self._restored:
            value = self._restored[name]
            self.values[name] = _filled(self._given[name], value) if name in self._restored_in_place else value


def _expect_that_it_can_be_kept(name: str, value: Any) -> None:
    try:
        Packer({}).pack(value, name)
    except TaskError as error:
        raise TrainError(f"run.keep({name}=...): {error}") from error


def _filled(into: Any, value: Any) -> Any:
    """Copy `value` into `into` in place and return `into`, if their types allow it; else return `value`."""
    if into is value or type(into) is not type(value):
        return value
    if isinstance(into, list):
        into[:] = value
    elif isinstance(into, collections.deque):
        into.clear()
        into.extend(value)
    elif isinstance(into, (dict, set)):
        into.clear()
        into.update(value)
    elif isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            into.copy_(value)
    elif isinstance(into, np.ndarray) and (into.shape, into.dtype) == (value.shape, value.dtype):
        into[...] = value
    else:
        return value
    return into


def _filled_deep(into: Any, value: Any) -> Any:
    """Like `_filled`, recursively."""
    if isinstance(into, list) and isinstance(value, list) and len(into) == len(value):
        value = [_filled_deep(*pair) for pair in zip(into, value, strict=True)]
    elif isinstance(into, dict) and isinstance(value, dict) and into.keys() == value.keys():
        value = type(value)({key: _filled_deep(into[key], part) for key, part in value.items()})
    return _filled(into, value)
