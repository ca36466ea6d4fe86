"""Reads samples of a map-style data set, seeding each one (or each batch, for sets with ``__getitems__``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from cluster_ddp.errors import Cause
from cluster_ddp.run.causes import cause_of_message
from cluster_ddp.train.data.collating import DEFAULT_COLLATES
from cluster_ddp.train.data.fingerprint import drawn_to, fingerprint_without_objects
from cluster_ddp.train.data.order import Indices
from cluster_ddp.train.data.sets import (
    fetches_by_batch,
    is_plain_rows,
    length_of,
    numbers_of_copies,
    place_in,
    positions_in,
    unwrapped,
)
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.randomness import (
    HOST_GENERATORS,
    OwnGenerators,
    derive,
    mix,
    parts_of,
    seed_host,
    seed_one,
    watch,
)
from cluster_ddp.words import listed

ALL_GENERATORS = tuple(range(len(HOST_GENERATORS)))

Collate = Callable[[list[Any]], Any]


class SeededReads:
    """Reads samples, and makes batches of them.

    Parameters
    ----------
    seed_words
        What the random numbers of a sample depend on, besides the epoch and its index.
    is_tried
        Whether the first samples have been compared, so that it is known which generators they draw from.
    """

    def __init__(self, data: Dataset[Any], collate: Collate, *seed_words: int, is_tried: bool) -> None:
        self._data, self._subsets = unwrapped(data)
        self._copies: Indices | None = None  # added to positions in the set if Subsets have some of them several times
        self._collate = collate
        self._base = derive(*seed_words)
        self._of_data: list[Any] | None = None
        self.is_tried = is_tried
        self._find_generators()
        # Whether generators at the top level of modules are seeded too; None, before the first batches: in any case.
        self._draws_around: bool | None = False if is_tried else None
        # Which of `HOST_GENERATORS` samples draw from: only these are seeded for each sample.
        self._used = ALL_GENERATORS
        self._collates_by_default = getattr(collate, "__func__", collate) in DEFAULT_COLLATES
        if is_plain_rows(self._data) and self._collates_by_default:
            self._read: Callable[[int, Indices], Any] = self._by_tensor
        elif fetches_by_batch(self._data):
            self._read = self._by_batch
        else:
            self._read = self._one_by_one
            if self._subsets:
                self._copies = numbers_of_copies(positions_in(self._subsets, np.arange(length_of(data))))

    @property
    def generators_around(self) -> list[Any]:
        """Generators at the top level of modules that are seeded for each sample in this process."""
        return list(self._around.values()) if self._draws_around else []

    def _outermost(self) -> Dataset[Any]:
        return self._subsets[0] if self._subsets else self._data

    def _places(self, indices: Indices) -> Indices:
        """What to read for samples of the outermost set: their positions in the innermost, and the numbers of copies.

        Raises
        ------
        DataError
            The outermost set has become shorter.
        """
        if not self._subsets:
            return indices
        try:
            places = positions_in(self._subsets, indices)
        except IndexError as error:
            raise DataError(
                "the training set (Subset) has fewer samples than when training began, when its length fixed the order "
                "of the samples: choose as many each time, or derive it from IterableDataset"
            ) from error
        return places if self._copies is None else places + self._copies[indices]

    def _find_generators(self) -> None:
        self._process, of_data = os.getpid(), list(OwnGenerators(self._data))
        if self._of_data is None or not self.is_tried or list(map(id, of_data)) != list(map(id, self._of_data)):
            self._of_data, self._own = of_data, self._held_generators()
        held, found = set(map(id, self._own)), generators_around(parts_of(self._data, self._collate))
        around = {name: generator for name, generator in found.items() if id(generator) not in held}
        self._around = {derive(*name.encode()): generator for name, generator in around.items()}

    def _held_generators(self) -> OwnGenerators:
        return OwnGenerators(self._data, getattr(self._collate, "__self__", self._collate))

    def _watched(self, read: Callable[[], Any]) -> Any:
        """Call `read`; if it draws from a generator at the top level of a module, again with all generators seeded."""
        if self._draws_around is not False or not self._around:
            return read()
        before = list(map(drawn_to, self._around.values()))
        found = read()
        if list(map(drawn_to, self._around.values())) == before:
            return found
        self._draws_around = True
        return read()

    def _seed_own(self, seed: int) -> None:
        self._own.seed(seed)
        if self._draws_around is not False:
            for name, generator in self._around.items():
                seed_one(generator, mix(seed ^ name))

    def _look(self, places: Indices) -> int:
        """The fingerprint of samples as in the first epoch, before collating, whichever have been read before."""
        if self._read == self._by_tensor:
            return fingerprint_without_objects(self._by_tensor(0, places))
        if self._read == self._by_batch:
            self._seed(mix(self._base ^ mix(0)) ^ int(places[0]))
            return fingerprint_without_objects(self._data.__getitems__(places.tolist()))  # type: ignore[attr-defined]
        return fingerprint_without_objects(self._items(0, places.tolist()))

    def _row_bytes(self) -> list[int]:
        return [tensor[:1].nbytes for tensor in self._data.tensors]  # type: ignore[attr-defined]

    def _by_tensor(self, epoch: int, indices: Indices) -> Any:
        chosen = torch.from_numpy(indices)
        return [
            tensor.index_select(0, chosen) if tensor.is_cpu else tensor.index_select(0, chosen.to(tensor.device))
            for tensor in self._data.tensors  # type: ignore[attr-defined]
        ]

    def _by_batch(self, epoch: int, indices: Indices) -> Any:
        self._seed(mix(self._base ^ mix(epoch)) ^ int(indices[0]))
        batch = self._data.__getitems__(indices.tolist())  # type: ignore[attr-defined]
        return self._collated(batch, indices) if isinstance(batch, list) else batch

    def _one_by_one(self, epoch: int, indices: Indices) -> Any:
        chosen = indices.tolist()
        items = self._items(epoch, chosen)
        if not self._collates_by_default:
            self._seed_others(mix(mix(self._base ^ mix(epoch)) ^ chosen[-1]))  # as the last sample would have left them
        return self._collated(items, indices)

    def _items(self, epoch: int, indices: list[int]) -> list[Any]:
        base = mix(self._base ^ mix(epoch))
        while (items := self._seeded(base, indices)) is None:
            pass
        return items

    def _seeded(self, base: int, indices: list[int]) -> list[Any] | None:
        """The samples, each seeded; None if one has drawn from a host generator that was not in use so far."""
        others = [number for number in ALL_GENERATORS if number not in self._used]
        untouched = [watch(number) for number in others]
        seeds: list[Callable[[int], object]] = [HOST_GENERATORS[number].seed for number in self._used]
        if self._own or (self._around and self._draws_around is not False):
            seeds.append(self._seed_own)
        items = []
        for index in indices:
            if seeds:
                seed = mix(base ^ index)
                for seed_generator in seeds:
                    seed_generator(seed)
            items.append(self._data[place_in(index)])
        if more := [number for number, holds in zip(others, untouched, strict=True) if not holds()]:
            self._used += tuple(more)
            return None
        return items

    def _seed_others(self, seed: int) -> None:
        for number, generator in enumerate(HOST_GENERATORS):
            if number not in self._used:
                generator.seed(seed)

    def _seed(self, word: int) -> None:
        seed = mix(word)
        seed_host(seed)
        self._seed_own(seed)

    def _collated(self, items: list[Any], indices: Indices) -> Any:
        if not self._collates_by_default:
            return self._collate(items)
        try:
            return self._collate(items)
        except (RuntimeError, TypeError, KeyError, IndexError, ValueError) as error:
            if cause_of_message(str(error)) is not Cause.PROGRAM:  # such as a full /dev/shm
                raise
            raise DataError(
                f"samples {listed(list(map(place_in, indices.tolist())), 8)} do not make a batch: {error}\n"
                "    give items of the same structure and shapes, or a collate function of your own"
            ) from error
