"""Makes the batches of the user's DataLoader a function of (seed, epoch) that can start at any batch."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import as_it_is
from cluster_ddp.train.errors import DataError, TrainError
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.own.data.held_data import held_data
from cluster_ddp.train.own.data.loader_copy import LoaderCopy, inside
from cluster_ddp.train.own.data.order import SamplerOrder, indices_in, name_of_order
from cluster_ddp.train.own.data.stream_batches import StreamBatches
from cluster_ddp.train.own.geometry import Deal
from cluster_ddp.train.randomness import OwnGenerators, Use, derive, mix, parts_of, seed_host
from cluster_ddp.train.ranks.distributed import all_gather_object, broadcast_object

Key = tuple[int, Any]  # the epoch, and the indices of a batch


class Batches(Protocol):
    """The batches of one rank."""

    length: int
    samples: int | None
    batch: int | None
    samplers: list[Any]
    deal: Deal | None
    remark: str | None  # a warning from `arrange`, if any

    @property
    def data(self) -> Any:
        """The data set that is read."""

    @property
    def generators(self) -> list[Any]:
        """The module-level random generators that are seeded for each sample in this process."""

    def arrange(self, seed: int) -> int | None:
        """Make the order a function of this seed; all ranks call it, once, before `begin`.

        Returns
        -------
        A fingerprint of what is read first or held, to detect changed data; None if there is none.
        """

    def begin(self, epoch: int, first: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, starting at number `first`."""

    def close(self) -> None:
        """Stop the workers."""


def batches_of(loader: Any, world_size: int, length: int | None) -> Batches:
    """The batches of a DataLoader, which is not modified.

    Parameters
    ----------
    length
        Batches per epoch and rank; None for the loader's own length.

    Raises
    ------
    TrainError
        The order cannot be made a function of the epoch.
    """
    inner = inside(loader)
    if not isinstance(inner, DataLoader):
        kind = type(loader).__name__
        held = (name for name, part in getattr(loader, "__dict__", {}).items() if isinstance(part, DataLoader))
        if (name := next(held, None)) is not None:
            raise TrainError(
                f"resumable() takes a torch.utils.data.DataLoader, and {kind} wraps one: pass in its .{name}, and "
                f"wrap what is returned, as in `for batch in {kind}(loader):`. If it takes a batch before the one "
                "before is trained on, no resume is exact: turn that off, in timm with create_loader(use_prefetcher="
                "False)"
            )
        raise TrainError(f"resumable() takes a torch.utils.data.DataLoader, not {kind}: make one of the data set")
    found = length or _length(loader)
    if isinstance(inner.dataset, IterableDataset):
        return StreamBatches(LoaderCopy(loader), found)
    return MapBatches(LoaderCopy(loader), found, world_size, told=length is not None)


def same_on_all_ranks(found: Batches) -> tuple[int | None, int | None, Deal | None]:
    """The batch size, the size of the data set and how it is dealt out; all None if each rank has its own data set.

    Raises
    ------
    TrainError
        The ranks have different numbers of batches.
    """
    all_ranks = all_gather_object((found.length, found.batch, found.samples))
    lengths = [length for length, _, _ in all_ranks]
    if len(set(lengths)) > 1:
        raise TrainError(
            f"the DataLoaders of the ranks give {', '.join(map(str, lengths))} batches in an epoch, by rank: the ranks "
            "sum gradients in each batch, and would wait for each other forever. Divide one data set with a "
            "DistributedSampler, or set batches= to how many each takes, at most the fewest"
        )
    return (found.batch, found.samples, found.deal) if len(set(all_ranks)) == 1 else (None, None, None)


class MapBatches:
    """Batches of a map-style data set, in the order of the loader's sampler, of any kind.

    Parameters
    ----------
    length
        Batches per epoch and rank.
    told
        Whether the program passed in that number, rather than the loader's own length being used.
    """

    def __init__(self, of: LoaderCopy, length: int, world_size: int, *, told: bool) -> None:
        self._copy, self.length = of, length
        self._by_batch = of.inner.batch_sampler is not None
        sampler = of.inner.batch_sampler if self._by_batch else of.inner.sampler
        self._order = SamplerOrder(sampler, length, world_size, has_own_length=not told)
        self.samples: int | None = len(of.inner.dataset) if hasattr(of.inner.dataset, "__len__") else None
        size = of.inner.batch_size if self._by_batch else None
        self.batch = size or getattr(of.inner.batch_sampler, "batch_size", None)
        self.samplers = self._order.chain
        self.deal: Deal | None = Deal(name_of_order(self.samplers), self._dealt(world_size))
        self.remark: str | None = None
        self._keys = _Keys(self._order)
        self._fetcher: Fetcher | None = None
        self._seen: _Seen

    @property
    def data(self) -> Any:
        """The data set that is read."""
        return self._copy.inner.dataset

    @property
    def generators(self) -> list[Any]:
        """The module-level generators that are seeded for each sample in this process."""
        return [] if self._fetcher is None else self._fetcher.generators_around

    def _dealt(self, world_size: int) -> int | None:
        """Samples per epoch on all ranks together."""
        found = [part.total_size for part in self.samplers if isinstance(getattr(part, "total_size", None), int)]
        if self.batch:
            taken: int = self.length * self.batch * world_size
            is_filled = any(getattr(part, "even_batches", False) for part in self.samplers)  # Accelerate's
            return taken if is_filled else min([taken, *(found or [self.samples or taken])])
        return min(found, default=self.samples)

    def arrange(self, seed: int) -> int | None:
        """Make the order a function of this seed; returns a fingerprint of what rank 0's data set holds."""
        inner = self._copy.inner
        held = broadcast_object(held_data(inner.dataset))
        self._order.seed = seed
        if self._by_batch:
            self._fetcher = Fetcher(inner.dataset, inner.collate_fn, Use.SAMPLE, seed, exact=True)
            self._seen = _ByBatch(inner.dataset, self._fetcher)
            self._copy.put(dataset=self._seen, batch_sampler=self._keys, collate_fn=as_it_is)
        else:
            self._seen = _OneByOne(inner.dataset, derive(Use.SAMPLE, seed))
            self._copy.put(dataset=self._seen, sampler=self._keys)
        return held

    def begin(self, epoch: int, first: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, starting at number `first`; earlier ones are not read."""
        self.enter(epoch, first)
        with contextlib.closing(iter(self._copy)) as batches:
            yield from map(self.checked, batches)

    def ordinary(self) -> Any:
        """A loader of the original kind, for a framework that iterates and skips batches itself.

        Call `enter` before each pass, and give each batch to `checked`.
        """
        return self._copy.loader

    def enter(self, epoch: int, first: int = 0) -> None:
        """Make the next pass that of this epoch, starting at batch `first`; its batches are for this thread."""
        self._keys.epoch, self._keys.first, self._keys.is_read = epoch, first, False
        self._copy.begin()
        self._seen.taken_in = os.getpid(), threading.get_ident()

    def checked(self, batch: Any) -> Any:
        """A batch that the loader gave, unless it could not be given again after a resume.

        Raises
        ------
        DataError, TrainError
            It could not.
        """
        if isinstance(batch, DataError):
            raise batch
        self._copy.note_workers()
        if not self._keys.is_read:
            raise TrainError(
                f"the {type(self._copy.inner).__name__} gives batches without asking its sampler, so no resume "
                "could be exact: give a torch.utils.data.DataLoader"
            )
        if self._fetcher is not None:
            self._fetcher.is_tried = True  # for the workers of the next epoch
        return batch

    def close(self) -> None:
        """Stop the workers."""
        self._copy.close()


class _Keys:
    """Replaces the loader's sampler; yields (epoch, indices)."""

    def __init__(self, order: SamplerOrder) -> None:
        self._order = order
        self.epoch = self.first = 0
        self.is_read = False

    def __iter__(self) -> Iterator[Key]:
        self.is_read = True
        for chosen in itertools.islice(self._order(self.epoch), self.first, None):
            yield self.epoch, chosen

    def __len__(self) -> int:
        return len(self._order.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_order"].sampler, name)


class _Seen(Dataset[Any]):
    """The user's data set, indexed by a key.

    Attributes
    ----------
    taken_in
        The process and the thread that take the batches.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.taken_in = (0, 0)

    def _in_other_thread(self) -> DataError | None:
        """The error if a thread reads beside the training, with which it shares the generators that are seeded."""
        process, thread = self.taken_in
        if os.getpid() != process or threading.get_ident() == thread:
            return None
        return DataError(
            "the DataLoader reads the data set in a thread of its own, so random numbers depend on which thread is "
            "faster: set num_workers to at least 1, or use a torch.utils.data.DataLoader, whose workers read ahead "
            "exactly"
        )

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_data" not in self.__dict__:  # while being unpickled
            raise AttributeError(name)
        return getattr(self._data, name)


class _ByBatch(_Seen):
    def __init__(self, data: Any, fetcher: Fetcher) -> None:
        super().__init__(data)
        self._fetcher = fetcher

    def __getitems__(self, key: Key) -> Any:
        if error := self._in_other_thread():
            return error
        try:
            return self._fetcher(key[0], np.array(indices_in(key[1]), dtype=np.int64))
        except DataError as error:
            return error  # if raised in a worker, it would carry the worker's traceback


class _OneByOne(_Seen):
    """For a loader that does no batching: an element of the sampler, possibly a list, indexes the data set directly."""

    def __init__(self, data: Any, base: int) -> None:
        super().__init__(data)
        self._base = base
        self._own = 0, OwnGenerators()  # a process id, and the generators in that process

    def __getitem__(self, key: Key) -> Any:
        if error := self._in_other_thread():
            return error
        if self._own[0] != os.getpid():  # a worker_init_fn may have created new ones
            around = generators_around(parts_of(self._data))
            self._own = os.getpid(), OwnGenerators(self._data, around=around)
        epoch, chosen = key
        seed = mix(mix(self._base ^ mix(epoch)) ^ indices_in(chosen)[0])
        seed_host(seed)
        self._own[1].seed(seed)
        return self._data[chosen]


def _length(loader: Any) -> int:
    try:
        length = len(loader)
    except TypeError as error:
        raise TrainError(
            "the data set has no length: give resumable(..., batches=) the number of batches in an epoch"
        ) from error
    if length == 0:
        raise TrainError("the DataLoader has no batches: the data set is empty, or smaller than a batch (drop_last)")
    return length
