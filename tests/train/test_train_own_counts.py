"""A count of the loop's own by which it goes is told; one that is only printed is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from cluster_ddp.train.own.watch.counts import Counts


class Kept:
    """What run.keep gives."""

    step = 0


def rate_of(step: int) -> float:
    return 1 / (step + 1)


def adjust_learning_rate(_: Any, step: int) -> None:
    """As the ImageNet example has it."""


def batches(messages: list[str]) -> Any:
    """Two epochs of three batches, which look at the loop after the second step of each."""
    counts = Counts(messages.append)

    def once() -> Any:
        for number in range(3):
            yield number
            if number == 1:
                counts.second()

    return once


def ends_by_a_limit(once: Any) -> None:
    completed = 0
    for _ in range(2):
        for _ in once():
            completed += 1
            if completed >= 5:
                break


def leaves_each_epoch_early(once: Any) -> None:
    for _ in range(2):
        taken = 0
        for _ in once():
            taken += 1  # noqa: SIM113 - as people write it
            if taken == 3:
                break


def sets_the_rate(once: Any) -> None:
    step = rate = 0
    for _ in range(2):
        for _ in once():
            rate = rate_of(step)
            step += 1
    assert rate


def sets_the_rate_by_a_call(once: Any) -> None:
    step = 0
    for _ in range(2):
        for _ in once():
            adjust_learning_rate(None, step)
            step += 1


def only_prints(once: Any) -> None:
    step = shown = seen = 0
    for _ in range(2):
        total = number = 0
        for size in once():
            step += 1
            shown += 1
            seen += size
            number += 1
            total += size
            print(step, f"{shown / 2}")
            if step % 2 == 0:
                print("every second")
        mean = total / number
        assert mean


def begins_at_the_place(once: Any, run: Any = Kept) -> None:
    step, kept = run.step, Kept()
    for _ in range(2):
        for _ in once():
            step += 1
            kept.step += 1
            if step > 5 or kept.step > 5:
                break


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (ends_by_a_limit, "completed"),
        (leaves_each_epoch_early, "taken"),
        (sets_the_rate, "step"),
        (sets_the_rate_by_a_call, "step"),
        (only_prints, None),
        (begins_at_the_place, None),
    ],
)
def test_a_count_by_which_the_loop_goes_is_told(loop: Callable[[Any], None], name: str | None) -> None:
    messages: list[str] = []
    loop(batches(messages))
    if name is None:
        assert messages == []
        return
    assert all(one == other for one, other in pairwise(messages))
    assert messages[0].startswith(f"the loop counts its batches in {name}, and uses that count")
    assert f"kept = run.keep({name}=0)" in messages[0]
