"""The order of samples: each once per epoch, the same global batches for every number of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_ddp.job import BatchPlan
from cluster_ddp.train import DataError, Permutation, SampleStream, rank_micro_batches


def plan(global_batch: int, world_size: int, accumulation: int = 1) -> BatchPlan:
    return BatchPlan(global_batch, world_size, accumulation, global_batch // world_size // accumulation)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_a_permutation_has_every_element_once(size: int, key: int) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(size=st.integers(1, 2**61), position=st.integers(0, 2**61))
@settings(max_examples=60)
def test_positions_of_huge_sets_cost_nothing(size: int, position: int) -> None:
    found = Permutation(size, 7)(np.array([position % size]))
    assert 0 <= found[0] < size


def test_orders_look_random() -> None:
    """Every sample comes to every place about as often; no sample keeps its neighbour."""
    size, keys = 20, 4000
    counts = np.zeros((size, size))
    kept = 0
    for key in range(keys):
        order = Permutation(size, key)(np.arange(size))
        counts[np.arange(size), order] += 1
        kept += int((np.diff(order) == 1).sum())
    expected = keys / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5
    assert abs(kept / keys - (size - 1) / size) < 0.1  # as in a random order, where it is 1 of `size` each


def test_epochs_differ_and_repeat() -> None:
    stream = SampleStream(samples=100, global_batch=10, seed=3)
    first = [stream.global_indices(step).tolist() for step in range(20)]
    assert first == [stream.global_indices(step).tolist() for step in range(20)]
    for epoch in (first[:10], first[10:]):
        assert sorted(itertools.chain.from_iterable(epoch)) == list(range(100))
    assert first[:10] != first[10:]
    other = SampleStream(samples=100, global_batch=10, seed=4)
    assert first[0] != other.global_indices(0).tolist()


@given(
    samples=st.integers(24, 400),
    drop_last=st.booleans(),
    start=st.integers(0, 40),
    count=st.integers(1, 30),
    accumulation=st.sampled_from([1, 2]),
)
@settings(max_examples=40)
def test_every_world_size_sees_the_same_global_batches(
    samples: int, drop_last: bool, start: int, count: int, accumulation: int
) -> None:
    stream = SampleStream(samples, 24, seed=1, drop_last=drop_last)
    for world_size in (1, 2, 3, 4):
        seen: dict[int, list[int]] = {}
        for rank in range(world_size):
            for micro in rank_micro_batches(stream, plan(24, world_size, accumulation), rank, start, start + count):
                assert len(micro.indices) and micro.global_batch == stream.size(micro.step)
                seen.setdefault(micro.step, []).extend(micro.indices[: micro.samples].tolist())
        assert sorted(seen) == list(range(start, start + count))
        for step, ids in seen.items():
            assert ids == stream.global_indices(step).tolist()


def test_ranks_make_equally_many_passes_in_a_small_last_step() -> None:
    stream = SampleStream(samples=27, global_batch=24, seed=0, drop_last=False)
    for world_size in (1, 2, 3, 4):
        ranks = [list(rank_micro_batches(stream, plan(24, world_size, 2), rank, 1, 2)) for rank in range(world_size)]
        assert len({len(own) for own in ranks}) == 1
        assert all([micro.last for micro in own] == [False] * (len(own) - 1) + [True] for own in ranks)
        assert sum(micro.samples for own in ranks for micro in own) == 3


def test_offsets() -> None:
    kept = SampleStream(samples=25, global_batch=10, seed=0, drop_last=False)
    assert [kept.consumed(step) for step in range(8)] == [0, 10, 20, 25, 35, 45, 50, 60]
    dropped = SampleStream(samples=25, global_batch=10, seed=0)
    assert [dropped.consumed(step) for step in range(5)] == [0, 10, 20, 30, 40]
    assert [dropped.epoch(step) for step in range(5)] == [0, 0, 1, 1, 2]


def test_a_set_shorter_than_a_global_batch() -> None:
    with pytest.raises(DataError, match=r"9 samples.*global batch of 10.*train\.drop_last: false"):
        SampleStream(samples=9, global_batch=10, seed=0)
    assert SampleStream(samples=9, global_batch=10, seed=0, drop_last=False).steps_per_epoch == 1
