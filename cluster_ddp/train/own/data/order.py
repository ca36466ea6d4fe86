"""Makes the order of a DataLoader's sampler a function of (seed, epoch)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data
from torch.utils.data import Dataset

from cluster_ddp.train.errors import DataError, TrainError
from cluster_ddp.train.randomness import Use, derive, seed_host

# Samplers whose order is determined by their generator, or by set_epoch.
_KNOWN = (
    torch_data.BatchSampler,
    torch_data.RandomSampler,
    torch_data.SequentialSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
)
_TRIED = 100_000  # elements that are compared, which takes 0.1 s
_INNER = ("sampler", "batch_sampler", "base_sampler")
_SEVERAL = ("samplers", "batch_samplers")


class SamplerOrder:
    """The order of a sampler in each epoch."""

    def __init__(self, sampler: Any, length: int, world_size: int, *, has_own_length: bool) -> None:
        self.sampler, self.seed = sampler, 0
        self._length = length
        self._own_length = _length_of(sampler) if has_own_length else None
        self.chain = list(samplers_in(sampler))
        self._is_known = all(type(part) in _KNOWN or type(part) is torch_data.DistributedSampler for part in self.chain)
        if world_size > 1 and all(type(part) in _KNOWN for part in self.chain):
            raise TrainError(
                f"each of the {world_size} ranks would train on all samples: give the DataLoader "
                "sampler=DistributedSampler(dataset), and shuffle there"
            )
        if not self._is_known and not (self._is_repeated_in_second_epoch() and self._first(0) == self._first(0)):
            unknown = next(part for part in reversed(self.chain) if type(part) not in _KNOWN)
            raise TrainError(
                f"the DataLoader's {type(unknown).__name__} gives a different order each time it is asked for the "
                "same epoch, so no resume could be exact: give it set_epoch(epoch), or an attribute `generator` "
                "(a torch.Generator) that it draws from, or draw from the global generators"
            )

    def __call__(self, epoch: int) -> Iterable[Any]:
        """The sampler's elements for an epoch, in order."""
        key = derive(Use.ORDER, self.seed, epoch)
        generator = torch.Generator().manual_seed(key)  # shared, so that two data sets of equal length differ in order
        for part in self.chain:
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
            if "generator" in getattr(part, "__dict__", {}):
                part.generator = generator
        if self._own_length is not None and (now := _length_of(self.sampler)) != self._own_length:
            raise DataError(
                f"the DataLoader's {type(self.sampler).__name__} has a length of {now} in epoch {epoch}, but had "
                f"{self._own_length} at first: all epochs must have the same length, by which a resume finds its "
                "epoch. Let the sampler give as many in each, or set batches= to how many are taken of each"
            )
        if self._is_known:
            return self._begun()
        seed_host(key)
        return list(itertools.islice(self.sampler, self._length))  # at once: it may draw from the global generators

    def _begun(self) -> Iterator[Any]:
        """The elements of a sampler, which draws its order first and then gets its generator removed.

        The program's own loader shares this sampler. If the program iterates over it, as for an evaluation within an
        epoch, it then draws from the global generators; from `generator`, its order would depend on how often the
        program has done so in this attempt.
        """
        chosen = iter(self.sampler)
        first = list(itertools.islice(chosen, 1))
        for part in self.chain:
            if "generator" in getattr(part, "__dict__", {}):
                part.generator = None
        return itertools.chain(first, chosen)

    def _is_repeated_in_second_epoch(self) -> bool:
        """Whether it is; some samplers shuffle only from there on, and begin with an order such as that of lengths."""
        with contextlib.suppress(Exception):  # there may be no second epoch
            return self._first(1) == self._first(1)
        return True

    def _first(self, epoch: int) -> list[list[int]]:
        return [indices_in(chosen) for chosen in itertools.islice(self(epoch), min(_TRIED, self._length))]


def samplers_in(sampler: Any) -> Iterator[Any]:
    """A sampler and those inside it."""
    seen: list[Any] = []
    todo = [sampler]
    while todo:
        part = todo.pop()
        if part is None or isinstance(part, (list, tuple, range, Dataset)) or any(part is other for other in seen):
            continue
        seen.append(part)
        yield part
        held = getattr(part, "__dict__", {})
        todo += [held[name] for name in _INNER if name in held]
        todo += [inner for name in _SEVERAL if isinstance(held.get(name), (list, tuple)) for inner in held[name]]


def name_of_order(chain: list[Any]) -> str:
    """The name by which a different order is detected.

    An unshuffled DistributedSampler, on several ranks, counts as the SequentialSampler of one.
    """
    last = chain[-1] if chain else None
    in_order = type(last) is torch_data.DistributedSampler and not last.shuffle
    return torch_data.SequentialSampler.__name__ if in_order else type(last).__name__


def indices_in(chosen: Any) -> list[int]:
    """The indices in an element of a sampler.

    Raises
    ------
    TrainError
        They are not integers.
    """
    try:
        return [int(index) for index in (chosen if isinstance(chosen, (list, tuple)) else np.atleast_1d(chosen))]
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"the sampler gives {chosen!r}: only integer indices can be given their own random numbers"
        ) from error


def _length_of(sampler: Any) -> int | None:
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(sampler)
    return None
