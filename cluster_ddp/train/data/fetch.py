"""Fetches batches from a map-style data set, and tries at first whether its samples are the same again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from cluster_ddp.printing import say
from cluster_ddp.train.data.another_worker import as_another_worker, in_copy_of_worker
from cluster_ddp.train.data.fingerprint import drawn_to, fingerprint, settled
from cluster_ddp.train.data.made_from import AtFirst
from cluster_ddp.train.data.order import Indices
from cluster_ddp.train.data.seeded_reads import ALL_GENERATORS, Collate, SeededReads
from cluster_ddp.train.data.sets import Numbers, copied, length_of, place_in, share_memory, warn_of_counts
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.randomness import drawn, parts_of

_TRIED = 32
_TOGETHER, _BYTES_TOGETHER = 32, 1 << 19  # the maximum number of batches (and bytes) fetched by one call
_ALIGNMENT = 64  # bytes, of memory that torch allocates on the CPU
_FEW = 4

LOOK = -1
"""In place of an epoch: the fingerprint of the samples is wanted, by which another data set is recognised."""


class Fetcher(SeededReads):
    """Makes batches of the samples at given indices.

    Parameters
    ----------
    seed_words
        What the random numbers of a sample depend on, besides the epoch and its index.
    exact
        Whether each process fetches the first samples twice, to check that they are the same again.

    Attributes
    ----------
    is_tried
        Whether that has been done.
    """

    def __init__(self, data: Dataset[Any], collate: Collate, *seed_words: int, exact: bool = False) -> None:
        super().__init__(data, collate, *seed_words, is_tried=not exact)
        self.is_changed_by_steps: Callable[[], bool] = bool  # what samples are made from; told elsewhere if need be
        self.at_first: AtFirst = nullcontext  # gives the task the state that it had before training
        self.is_resumed = False  # whether it had another when the first samples were fetched
        # A batch's fingerprint before training, its epoch and indices, to detect whether passes over the set change it.
        self._at_first: tuple[int, int, Indices] | None = None
        self._looked_at_again = 0  # the epoch from which to check it again
        self._length = 0  # the length of the set before training
        self._untouched: Any = None  # a copy of the set before it is read; kept, as some close files when deleted
        self._may_change = False  # whether training may change the rows of a TensorDataset

    def __call__(self, epoch: int, indices: Indices) -> Any:
        """Fetch the samples at `indices`, int64 of shape (n,), as one batch, or their fingerprint for the epoch `LOOK`.

        Raises
        ------
        DataError
            The items do not fit together, or differ when fetched again. Errors of the data set itself and of a custom
            `collate` are raised unchanged.
        """
        # A worker's worker_init_fn may have created new generators, as monai's does; earlier, a task's load_state_dict
        # may.
        if self._process != os.getpid() or not self.is_tried:
            self._find_generators()
        places = self._places(indices)
        if epoch == LOOK:
            return self._watched(lambda: self._look(places))
        if not self.is_tried:
            self.is_tried = True
            self._try_twice(epoch, places[:_TRIED])
        elif self._at_first is not None and epoch >= self._looked_at_again:
            self._looked_at_again = 2 * epoch  # rarely enough to cost nothing
            self._try_after_a_pass()
        return self._watched(lambda: self._read(epoch, places))

    def expect_changes(self, *holders: object) -> None:
        """Fetch each batch only when its step begins if one of these holds the rows or a Subset, to change it."""
        if self._read == self._by_tensor:
            chosen = [subset.indices for subset in self._subsets]
            arrays = [torch.as_tensor(held) for held in chosen if isinstance(held, (Tensor, np.ndarray))]
            known = {id(part) for part in (*self._subsets, *chosen)}
            are_held = any(id(part) in known for part in parts_of(*holders))
            self._may_change = are_held or share_memory([*self._data.tensors, *arrays], holders)  # type: ignore[attr-defined]

    def versions(self) -> list[int]:
        """Numbers that change with the rows, except by way of ``.data`` or ``.numpy()``."""
        tensors = self._data.tensors if self._read == self._by_tensor else ()  # type: ignore[attr-defined]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def how_many_together(self, samples: int) -> int:
        """How many batches of this size to fetch by one call, whose overhead dominates for a few small rows."""
        if self._read != self._by_tensor or self._may_change:
            return 1
        return max(1, min(_TOGETHER, _BYTES_TOGETHER // max(1, sum(self._row_bytes()) * samples)))

    def together(self, keys: Sequence[tuple[int, Indices]]) -> Iterable[Any]:
        """Fetch a batch for each (epoch, indices), with the bits and the alignment that it has when fetched alone.

        The last bits of MKL's results depend on the alignment of its operands, and a resume groups batches differently.
        """
        sizes = [len(indices) for _, indices in keys]
        looks = any(epoch == LOOK for epoch, _ in keys)
        if looks or len(keys) == 1 or any(size * row % _ALIGNMENT for size in set(sizes) for row in self._row_bytes()):
            return [self(*key) for key in keys]
        tensors = self(0, np.concatenate([indices for _, indices in keys]))
        return map(list, zip(*(tensor.split(sizes) for tensor in tensors), strict=True))

    def _try_twice(self, epoch: int, indices: Indices) -> None:
        """Raise a `DataError` unless the same seed gives the same samples."""
        if self._read == self._by_tensor:
            return
        there = in_copy_of_worker(lambda: self._after_others(epoch, indices))
        self._untouched, self._length = copied(self._data), length_of(self._outermost())
        numbers: list[Numbers] = []

        def read() -> int:
            seen = fingerprint(self._read(epoch, indices))
            self._own = self._held_generators()  # collate() may make one when it is called, as collators with a seed do
            numbers.append(Numbers(self._data, getattr(self._collate, "__self__", self._collate)))
            return seen

        found = settled(read)
        if found is not None:
            warn_of_counts(self._data, *numbers[-2:])
            self._refuse_workers_own(epoch, indices, found)
            other = fingerprint(self._read(epoch + 1, indices))
            self._refuse_memory(epoch, indices, other, there)
            self._at_first, self._looked_at_again = (other, epoch + 1, indices), epoch + 1
            self._used = ()
            # A set may take its seed from a generator without drawing from it.
            if fingerprint(self._read(epoch + 1, indices)) != other:
                self._used = ALL_GENERATORS
            self._draws_around = False  # until it is seen to draw
            return
        changing = [index for index in indices.reshape(-1, 1) if self._changes(epoch, index)]
        what = f"sample {place_in(changing[0].item())}" if changing else "a batch"
        raise DataError(
            f"{what} of the training set ({type(self._data).__name__}) differs when it is fetched again with the same "
            "seed, so no resume could be exact: the set or collate() draws from a generator that nothing seeds or in "
            "threads of its own, counts its calls, or changes its samples in place. Use the generators of torch, "
            "random or NumPy, which are seeded for each sample, or keep the generator as an attribute of the data set: "
            "it is seeded too; draw before work is handed to threads"
        )

    def _refuse_workers_own(self, epoch: int, indices: Indices, here: int) -> None:
        """Raise a `DataError` if samples depend on which worker reads them, because a resume uses another one."""
        if get_worker_info() is None:
            return
        with as_another_worker():
            there = fingerprint(self._read(epoch, indices))
        if there != here:
            raise DataError(
                f"the training set ({type(self._data).__name__}) gives different samples in a different worker, so no "
                "resume could be exact: they depend on the id or the seed that get_worker_info() gives. Use the "
                "global generators of torch, random or NumPy, which are seeded for each sample in every worker"
            )

    def _try_after_a_pass(self) -> None:
        """Warn if a batch has changed since before the first pass; a resume may restore what changed it."""
        assert self._at_first is not None
        was, epoch, indices = self._at_first
        worker = get_worker_info()
        if worker is not None and worker.id != 0:
            self._at_first = None
            return
        if (items := length_of(self._outermost())) != self._length:
            self._at_first = None
            say(
                f"cluster-ddp: the training set ({type(self._data).__name__}) has {items} items after a pass, but had "
                f"{self._length} before: every epoch uses the items that it had when training began. Give it its final "
                "length, or derive it from IterableDataset"
            )
        if not self.is_changed_by_steps() and (now := fingerprint(self._read(epoch, indices))) != was:
            self._at_first = None
            with self.at_first():  # they may be made from what the task saves, such as a level that it has just raised
                again = fingerprint(self._read(epoch, indices))
            if again == was or (self.is_resumed and again != now):
                return
            say(
                f"cluster-ddp: the training set ({type(self._data).__name__}) returns different samples after a pass "
                "than before it, with the same seed: a resume is exact only if whatever changed in it is restored. A "
                "cache must hold samples before augmentation"
            )

    def _refuse_memory(self, epoch: int, indices: Indices, other: int, there: int | None) -> None:
        """Raise a `DataError` if samples depend on what was read before, which a resume does not read again.

        Parameters
        ----------
        other
            The fingerprint of the samples in the next epoch.
        there
            The same where others have been read first; None if that is not known.
        """
        how = None
        few = indices[:_FEW]
        first = fingerprint(self._read(epoch, few))
        self._read(epoch, few[::-1])
        if fingerprint(self._read(epoch, few)) != first:
            how = "gives different samples after others have been read: the set or collate() keeps something of them"
        elif self._draws_once(epoch, indices):
            how = "draws the random numbers of a sample when it is read for the first time, and keeps the result"
        else:
            if there is None and self._untouched is not None:
                data, self._data, own = self._data, self._untouched, self._own
                self._own = self._held_generators()
                with contextlib.suppress(Exception):  # for example if a file cannot be opened a second time
                    there = self._after_others(epoch, indices)
                self._data, self._own = data, own
            if there not in (None, other):
                how = (
                    "or collate() keeps something from the first samples it reads, such as random numbers that it "
                    "draws once, or word numbers in order of appearance"
                )
        if how is not None:
            raise DataError(
                f"the training set ({type(self._data).__name__}) {how}, so no resume could be exact: draw and "
                "number in __init__, which is seeded, or draw for every sample; a cache has to hold samples before "
                "augmentation"
            )

    def _after_others(self, epoch: int, indices: Indices) -> int:
        """The fingerprint of the samples in the next epoch, read after the last few of them."""
        self._read(epoch, indices[: -_FEW - 1 : -1])
        self._own = self._held_generators()
        return fingerprint(self._read(epoch + 1, indices))

    def _draws_once(self, epoch: int, indices: Indices) -> bool:
        """Whether a sample draws random numbers only when it is read for the first time."""
        places = self._places(np.arange(self._length)).tolist()
        tried = set(indices.tolist())
        new = next((place for place in reversed(places) if place not in tried), None)
        if new is None:
            return False
        draws: list[tuple[Any, ...]] = []
        for _ in range(2):
            self._read(epoch, np.array([new], dtype=np.int64))
            draws.append((drawn(), *map(drawn_to, (*self._own, *self._around.values()))))
        return draws[0] != draws[1]

    def _changes(self, epoch: int, index: Indices) -> bool:
        return fingerprint(self._read(epoch, index)) != fingerprint(self._read(epoch, index))
