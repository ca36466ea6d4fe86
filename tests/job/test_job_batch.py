"""The division of the global batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_ddp.job import BatchError, BatchPlan, TrainSpec, plan_batch


def test_the_global_batch_follows_from_the_batch_of_a_rank() -> None:
    assert plan_batch(TrainSpec(batch_size=32), 4) == BatchPlan(128, 4, 1, 32)
    assert plan_batch(TrainSpec(batch_size=32, accumulation_steps=4), 2) == BatchPlan(256, 2, 4, 32)
    assert plan_batch(TrainSpec(), 1) == BatchPlan(32, 1, 1, 32)


def test_the_micro_batch_adapts_to_the_world_size() -> None:
    train = TrainSpec(global_batch=24)
    assert plan_batch(train, 4).micro_batch == 6
    assert plan_batch(train, 3).micro_batch == 8


def test_batch_size_is_the_ceiling_of_the_micro_batch() -> None:
    train = TrainSpec(global_batch=24, batch_size=8)
    assert plan_batch(train, 4) == BatchPlan(24, 4, 1, 6)
    assert plan_batch(train, 3) == BatchPlan(24, 3, 1, 8)
    assert plan_batch(train, 2) == BatchPlan(24, 2, 2, 6)
    assert plan_batch(train, 1) == BatchPlan(24, 1, 3, 8)


def test_a_run_keeps_its_global_batch_on_another_world_size() -> None:
    train = TrainSpec(batch_size=8)
    first = plan_batch(train, 4)
    assert first.global_batch == 32
    assert plan_batch(train, 2, global_batch=32) == BatchPlan(32, 2, 2, 8)
    assert plan_batch(train, 8, global_batch=32) == BatchPlan(32, 8, 1, 4)


def test_accumulation_is_kept_as_asked_for_and_adapts_later() -> None:
    train = TrainSpec(global_batch=64, accumulation_steps=2)
    assert plan_batch(train, 4) == BatchPlan(64, 4, 2, 8)
    assert plan_batch(train, 64, global_batch=64) == BatchPlan(64, 64, 1, 1)
    with pytest.raises(BatchError, match="2 accumulation steps"):
        plan_batch(train, 64)
    with pytest.raises(BatchError, match=r"4 accumulation steps with train\.batch_size: 2"):
        plan_batch(TrainSpec(global_batch=64, accumulation_steps=4, batch_size=2), 1)


def test_an_error_names_world_sizes_that_divide() -> None:
    with pytest.raises(BatchError) as caught:
        plan_batch(TrainSpec(global_batch=24), 5)
    assert "24 cannot be divided among 5 ranks" in str(caught.value)
    assert "1, 2, 3, 4, 6, 8, 12, 24" in str(caught.value)
    assert caught.value.exit_status == 2


def test_large_batches_are_planned_at_once() -> None:
    prime = 2**31 - 1
    assert plan_batch(TrainSpec(global_batch=prime), 1, global_batch=prime).micro_batch == prime
    assert plan_batch(TrainSpec(batch_size=7), 1, global_batch=prime) == BatchPlan(prime, 1, prime, 1)


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.one_of(st.none(), st.integers(1, 8)),
    st.one_of(st.none(), st.integers(1, 512)),
)
def test_a_plan_is_exact_and_resumes_as_itself(
    world: int, batch_size: int, steps: int | None, global_batch: int | None
) -> None:
    total = None if global_batch is None else global_batch * batch_size * (steps or 1)
    train = TrainSpec(batch_size=batch_size, accumulation_steps=steps, global_batch=total)
    try:
        plan = plan_batch(train, world)
    except BatchError:
        assert total is not None
        return
    assert plan.global_batch == plan.world_size * plan.accumulation_steps * plan.micro_batch
    assert plan.micro_batch <= batch_size
    assert plan_batch(train, world, global_batch=plan.global_batch) == plan
    if steps is not None:
        assert plan.accumulation_steps == steps
