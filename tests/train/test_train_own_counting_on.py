"""A count that goes on from the place of a resume is not told; one that only seems to is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from counted_epochs import Kept, batches


def goes_on_counting(once: Any) -> None:
    """As the examples of transformers without a Trainer do."""
    run = Kept()
    completed = 0
    if run.step > 0:
        completed = run.step
    for _ in range(2):
        for _ in once():
            completed += 1
            if completed >= 5:
                break
        if completed >= 5:
            break


def goes_on_counting_in_each_epoch(once: Any) -> None:
    run, kept = Kept(), Kept(number=0)
    completed = number = 0
    for _ in range(2):
        completed, number = run.step, kept.number
        for _ in once():
            completed += 1
            number += 1
            kept.number = number
            if completed >= 5 or number >= 5:
                break


def begins_at_either(once: Any, *, is_resumed: bool = False) -> None:
    run = Kept()
    if is_resumed:
        completed = run.step
    else:
        completed = 0
    for _ in range(2):
        for _ in once():
            completed += 1
            if completed >= 5:
                break


def begins_again_after_all(once: Any) -> None:
    run = Kept()
    completed = run.step
    completed = 0
    for _ in range(2):
        for _ in once():
            completed += 1
            if completed >= 5:
                break


@pytest.mark.parametrize("loop", [goes_on_counting, goes_on_counting_in_each_epoch, begins_at_either])
def test_a_count_that_goes_on_from_the_place_is_not_told(loop: Callable[[Any], None]) -> None:
    messages: list[str] = []
    loop(batches(messages))
    assert messages == []


def test_a_count_that_only_seems_to_go_on_is_told() -> None:
    messages: list[str] = []
    begins_again_after_all(batches(messages))
    assert "completed" in messages[0]
