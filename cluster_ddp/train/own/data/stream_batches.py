"""Batches of an iterable data set: tried before the first step, and read again up to the position on a resume."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Generator
from typing import Any

import torch

from cluster_ddp.train.data.fingerprint import fingerprint, settled
from cluster_ddp.train.data.seeded_reads import Collate
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.data.loader_copy import LoaderCopy
from cluster_ddp.train.own.geometry import Deal
from cluster_ddp.train.randomness import OwnGenerators, Use, derive, mix, seed_host
from cluster_ddp.train.ranks.distributed import all_gather_object

_END = object()
_TRIED = 3


class StreamBatches:
    """Batches of an iterable data set; a resume reads those before its position again and drops them.

    Attributes
    ----------
    data
        The data set that is read.
    remark
        A warning from the trial, if any.
    """

    def __init__(self, of: LoaderCopy, length: int) -> None:
        self._copy, self.length = of, length
        self.samples: int | None = None
        self.batch: int | None = None
        self.samplers: list[Any] = []
        self.deal: Deal | None = None
        self.remark: str | None = None
        self.generators: list[Any] = []
        self.data: Any = of.inner.dataset
        self._own = OwnGenerators(self.data)
        self._name = type(self.data).__name__
        self._reads_in_threads = False
        self._items: list[int] = []
        self._seed = 0
        self._other = 0  # nonzero during a trial in which the global generators draw different numbers

    def arrange(self, seed: int) -> int:
        """Make the random numbers a function of this seed, and check that reading twice gives the same items.

        Raises
        ------
        TrainError
            It does not.
        """
        self._seed = seed
        # Persistent workers would continue with the generators of the previous epoch.
        self._copy.put(generator=torch.Generator(), persistent_workers=False)
        seen = all_gather_object(self._try())
        if len(seen) > 1 and len(set(seen)) == 1:
            self.remark = (
                f"all ranks read the same items from the {self._name}, so each rank trains on all of them rather than "
                "on its share: divide the stream by rank, as split_dataset_by_node of datasets does"
            )
        return fingerprint(seen)

    def begin(self, epoch: int, first: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, starting at number `first`."""
        if callable(set_epoch := getattr(self.data, "set_epoch", None)):
            set_epoch(epoch)
        self._copy.inner.generator.manual_seed(derive(Use.ORDER, self._seed, epoch) ^ self._other)  # seeds the workers
        base = derive(Use.SAMPLE, self._seed, epoch)
        if self._copy.inner.num_workers == 0:
            self._own.seed(mix(base))  # once: the set may draw ahead, and each pass is read from its start
        self._seed_globals(base, 0)
        with contextlib.closing(iter(self._copy)) as batches:
            for number in itertools.count():
                self._seed_globals(base, number)
                batch = next(batches, _END)
                if batch is _END:
                    return
                if number >= first:
                    yield batch

    def _try(self) -> int:
        """Read the first batches repeatedly until they settle, with the workers if any; returns their fingerprint."""
        collate = self._copy.inner.collate_fn
        self._copy.put(collate_fn=_Watched(collate))
        # The ranks read equally often: those of MosaicML Streaming wait for each other at the start of each pass.
        first = settled(lambda: fingerprint(self._first()), _on_all_ranks)
        if not _on_all_ranks(not self._reads_in_threads) and (first is None or self._draws()):
            raise TrainError(
                f"the {self._name} reads in its own threads, and draws random numbers there, which cannot be seeded: "
                "no resume could be exact. Move the random part into the DataLoader's collate_fn, or into the loop; "
                "for MosaicML Streaming see docs/own-code.md"
            )
        if first is None:
            raise TrainError(
                f"the {self._name} gives different items when the same epoch is read again, so no resume could be "
                "exact: let its order follow from set_epoch(epoch), or from the global generators, which are seeded "
                "before each pass, not from the time or a count of its passes; for WebDataset see docs/own-code.md"
            )
        self._copy.put(collate_fn=collate)
        return first

    def _draws(self) -> bool:
        """Whether the items of the first batches, which have been read, depend on the global generators.

        The data set's own generators draw the same as before; its order may depend on these, even in a thread.
        """
        seen = self._items
        self._other = 1
        self._first()
        self._other = 0
        return self._items != seen

    def _first(self) -> list[Any]:
        with contextlib.closing(self.begin(0, 0)) as batches:
            found = list(itertools.islice(batches, _TRIED))
        self._reads_in_threads |= any(has_threads for has_threads, _, _ in found)
        self._items = [items for _, items, _ in found]  # without collate_fn, which never draws in a thread
        return [batch for _, _, batch in found]

    def close(self) -> None:
        """Stop the workers."""
        self._copy.close()

    def _seed_globals(self, base: int, number: int) -> None:
        if self._copy.inner.num_workers == 0:
            seed_host(mix(base ^ number) ^ self._other)


def _on_all_ranks(holds: bool) -> bool:
    return all(all_gather_object(holds))


class _Watched:
    """A collate function that also returns a fingerprint of the items and, first, whether the set started threads."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._process, self._threads = os.getpid(), threading.active_count()
        self._is_first = True

    def __call__(self, items: Any) -> tuple[bool, int, Any]:
        usual = self._threads if os.getpid() == self._process else 1
        has_more = self._is_first and threading.active_count() > usual
        self._is_first = False  # later, a worker has a thread that sends its batches
        return has_more, fingerprint(items), self._collate(items)
