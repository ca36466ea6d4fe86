"""What a custom loop keeps in the checkpoint besides the things that it hands over."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster_ddp.train.distributed import all_gather_object, find_world
from cluster_ddp.train.errors import TaskError, TrainError
from cluster_ddp.train.own.values import tensors_in
from cluster_ddp.train.state.packing import Packer, Unpacker


class Kept(SimpleNamespace):
    """Numbers of the loop's own, as attributes: `ScriptRun.keep`."""


class KeptNumbers:
    """What the loop keeps by `ScriptRun.keep`, before or after the checkpoint is restored: each rank its own.

    Attributes
    ----------
    by_rank
        The values of all ranks when they were last gathered.
    in_place
        Names of those, by rank, that were still the very objects that the program had given then. They are put back
        into the objects that it gives after a resume, for it may have other names for these.
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
        """What is kept, as it is now."""
        return vars(self._kept)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are kept."""
        return tensors_in(self.values)

    def add(self, initial: dict[str, Any]) -> Kept:
        """Keep these, with what was restored instead of the initial values."""
        for name, value in initial.items():
            _expect_that_it_can_be_kept(name, value)
            self._given[name] = self.values[name] = value
            self._put_back(name)
        return self._kept

    def first(self) -> None:
        """See, after the first step, that what it has put there can be kept, and not at the first save, which is later.

        Raises
        ------
        TrainError
            Something cannot.
        """
        for name, value in self.values.items():
            _expect_that_it_can_be_kept(name, value)

    second = first

    def as_now(self) -> Callable[[], None]:
        """What puts the values back as they are now; what is kept from later on, as it was restored."""
        objects, now = dict(self.values), copy.deepcopy({**self._restored, **self.values})

        def put_back() -> None:
            for name, value in now.items():
                if name in self.values:
                    self.values[name] = _filled_deep(objects.get(name, self.values[name]), value)

        return put_back

    def gather(self) -> None:
        """Collect the values of all ranks, which call it together, before a save.

        What was restored and not asked for stays.
        """
        values = {**self._restored, **self.values}
        if values:
            same = {name for name, given in self._given.items() if self.values.get(name) is given}
            in_place = sorted(same | self._restored_in_place - self.values.keys())
            tensors: dict[str, Tensor] = {}
            packed = Packer(tensors).pack(values, "run.keep")
            # Else they would come to the GPU of the rank that sends them, from each rank.
            on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
            gathered = all_gather_object((packed, on_host, in_place))
            device = find_world().device
            self.by_rank = [Unpacker(device).unpack(found, of_rank.pop) for found, of_rank, _ in gathered]
            self.in_place = [names for _, _, names in gathered]

    def restore(self, by_rank: list[dict[str, Any]], in_place: list[list[str]]) -> None:
        """Take back what was gathered; on a different number of ranks what rank 0 had."""
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
    """The first object with the content of the second, where it can take that; else the second."""
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
    """The same for what the object holds, too."""
    if isinstance(into, list) and isinstance(value, list) and len(into) == len(value):
        value = [_filled_deep(*pair) for pair in zip(into, value, strict=True)]
    elif isinstance(into, dict) and isinstance(value, dict) and into.keys() == value.keys():
        value = type(value)({key: _filled_deep(into[key], part) for key, part in value.items()})
    return _filled(into, value)
