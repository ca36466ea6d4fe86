"""Which samples a step trains on: a function of (seed, step), computed when needed and never stored.

The order of an epoch is a keyed permutation of the sample indices. Any position in it takes a few operations to
compute, so a resume jumps directly to its place, a billion samples need no list, and every world size has the same
global batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster_ddp.job.batch import BatchPlan
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.randomness import Use, derive

Indices = NDArray[np.int64]

Words = NDArray[np.uint64]

_ROUNDS = 6
_HALF = np.uint64(32)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MAX_SIZE = 1 << 62
# Positions permuted in one call: enough to spread the overhead of a NumPy call over many steps.
_BLOCK = 8192


class Order(Protocol):
    """Maps a number of finished steps to a position in the data."""

    def epoch(self, step: int) -> int:
        """The current epoch after `step` finished steps."""

    def consumed(self, step: int) -> int:
        """The sample offset after `step` finished steps."""


class Permutation:
    """A permutation of ``range(size)`` chosen by a key, evaluated at any positions.

    A Feistel network over pairs (left, right) with left < a, right < b and a * b just above `size`; the few results
    outside the range are sent through again (cycle walking), which keeps it one-to-one.

    Parameters
    ----------
    size
        Number of elements, at least 1.
    key
        64 bits; a different key gives a different order.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size < _MAX_SIZE:
            raise ValueError(f"a permutation of {size} elements; it must be at least 1 and below 2**62")
        rows = math.isqrt(size - 1) + 1
        self._size, self._rows, self._columns = np.uint64(size), np.uint64(rows), np.uint64(-(-size // rows))
        self._keys = [np.uint64(derive(key, number)) for number in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """Map positions, int64 of any shape with values in ``range(size)``, to indices of the same shape."""
        result = self._once(positions.astype(np.uint64))
        outside = result >= self._size
        while outside.any():
            result[outside] = self._once(result[outside])
            outside = result >= self._size
        return result.view(np.int64)

    def _once(self, words: Words) -> Words:
        left, right = np.divmod(words, self._columns)
        for number in range(0, _ROUNDS, 2):
            _shift(left, right, self._keys[number], self._rows)
            _shift(right, left, self._keys[number + 1], self._columns)
        left *= self._columns
        left += right
        return left


def _shift(words: Words, by: Words, key: np.uint64, limit: np.uint64) -> None:
    """Add to each word a hash of its partner and the key, modulo `limit` (below 2**32)."""
    hashed = by ^ key
    hashed *= _FIRST_FACTOR
    hashed ^= hashed >> _HALF
    hashed *= _SECOND_FACTOR
    hashed >>= _HALF
    hashed *= limit
    hashed >>= _HALF
    words += hashed
    # Modulo without division: below the limit, the subtraction wraps to a huge number.
    np.minimum(words, words - limit, out=words)


@dataclass(frozen=True)
class SampleStream:
    """The global batches of a training run, in order.

    Parameters
    ----------
    samples
        Length of the data set.
    global_batch
        Samples per step over all ranks and accumulation steps.
    seed
        The run's seed.
    drop_last
        Whether to drop the last global batch of an epoch if it is incomplete. Otherwise it is smaller, and its loss is
        the mean over its samples.

    Raises
    ------
    DataError
        There are fewer samples than one global batch, and `drop_last` would leave nothing.
    """

    samples: int
    global_batch: int
    seed: int
    drop_last: bool = True
    steps_per_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        whole, rest = divmod(self.samples, self.global_batch)
        steps = whole if self.drop_last or not rest else whole + 1
        if steps == 0:
            raise DataError(
                f"the training set has {self.samples} samples, less than one global batch of {self.global_batch}: "
                "lower train.batch_size or train.global_batch, or set train.drop_last: false"
            )
        object.__setattr__(self, "steps_per_epoch", steps)

    def epoch(self, step: int) -> int:
        """The epoch of this step; both count from 0."""
        return step // self.steps_per_epoch

    def consumed(self, step: int) -> int:
        """The sample offset after `step` finished steps."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self._per_epoch + min(within * self.global_batch, self._per_epoch)

    @property
    def _per_epoch(self) -> int:
        return min(self.steps_per_epoch * self.global_batch, self.samples)

    def size(self, step: int) -> int:
        """Samples in the global batch of this step; less than `global_batch` only at the end of an epoch."""
        first = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.samples - first)

    def global_indices(self, step: int) -> Indices:
        """The sample indices of this step's global batch, in order, int64 of shape (size,)."""
        first = step % self.steps_per_epoch * self.global_batch
        return self.order(self.epoch(step))(np.arange(first, first + self.size(step)))

    def order(self, epoch: int) -> Permutation:
        """The order of the samples in this epoch."""
        return Permutation(self.samples, derive(Use.ORDER, self.seed, epoch))


class MicroBatch(NamedTuple):
    """What one rank fetches for one forward and backward pass.

    Attributes
    ----------
    step, number
        The step, and the number of the micro-batch within that step on this rank; both count from 0.
    epoch
        The epoch of its samples.
    indices
        Samples to fetch, int64 of shape (n,). Never empty: a rank that has none left in a small last batch computes on
        one sample of it with weight 0, because the other ranks wait for its gradients.
    samples
        How many of them count: n or 0.
    global_batch
        Samples in the global batch of that step.
    last
        Whether it is the last micro-batch before the step's update.
    """

    step: int
    number: int
    epoch: int
    indices: Indices
    samples: int
    global_batch: int
    last: bool


def rank_micro_batches(stream: SampleStream, plan: BatchPlan, rank: int, start: int, stop: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank for the steps from `start` up to `stop`.

    The global batch is cut into one contiguous piece per rank, and each piece into the rank's micro-batches; so the
    numbers of ranks and of accumulation steps affect which rank computes a sample, never which step it belongs to.
    """
    step = start
    while step < stop:
        within = step % stream.steps_per_epoch
        if stream.size(step) < plan.global_batch:
            yield from _small_step(stream, plan, rank, step)
            step += 1
            continue
        full = stream.samples // stream.global_batch - within
        count = min(stop - step, full, max(1, _BLOCK // (plan.micro_batch * plan.accumulation_steps)))
        yield from _full_steps(stream, plan, rank, step, count)
        step += count


def _full_steps(stream: SampleStream, plan: BatchPlan, rank: int, first: int, count: int) -> Iterator[MicroBatch]:
    epoch, within = divmod(first, stream.steps_per_epoch)
    piece = plan.micro_batch * plan.accumulation_steps
    starts = (within + np.arange(count)) * plan.global_batch + rank * piece
    indices = stream.order(epoch)(starts[:, None] + np.arange(piece))
    micro_batches = indices.reshape(count, plan.accumulation_steps, plan.micro_batch)
    for offset in range(count):
        for number in range(plan.accumulation_steps):
            chosen = micro_batches[offset, number]
            last = number == plan.accumulation_steps - 1
            yield MicroBatch(first + offset, number, epoch, chosen, plan.micro_batch, plan.global_batch, last)


def _small_step(stream: SampleStream, plan: BatchPlan, rank: int, step: int) -> Iterator[MicroBatch]:
    indices = stream.global_indices(step)
    pieces = np.array_split(indices, plan.world_size)
    passes = -(-len(pieces[0]) // plan.micro_batch)  # the first piece is the largest: all ranks run equally many passes
    for number, chosen in enumerate(np.array_split(pieces[rank], passes)):
        fetched = chosen if len(chosen) else indices[:1]
        yield MicroBatch(step, number, stream.epoch(step), fetched, len(chosen), len(indices), number == passes - 1)
