"""A loop whose own rounds take the batches is told, for they start over; one that begins at its place is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_ddp.train.own.kept import Kept
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.rounds import watch_rounds

passed_in = SimpleNamespace(step=0)


class Run:
    """What the loop has of its run, and a generator that looks at it after the first steps of an attempt."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.messages = step, list[str]()
        self.watch = watch_rounds(lambda: self.step, Reported(self.messages.append), [passed_in])

    def batches(self, accumulate: int = 1) -> Iterator[int]:
        for is_looked_at in (False, True, True, False):
            if is_looked_at:
                next(self.watch, None)
            yield from range(accumulate)
            self.step += 1


def over_a_range(run: Run) -> None:
    batches = run.batches()
    for step in range(4):
        print(step, next(batches))


def behind_a_progress_bar(run: Run, tqdm: Any = iter) -> None:
    batches = run.batches()
    for step in tqdm(range(1, 5)):
        print(step, next(batches))


def over_a_count(run: Run) -> None:
    batches = run.batches()
    for step in itertools.count():
        if next(batches, None) is None:
            print(step)
            break


def while_there_are_steps(run: Run) -> None:
    batches, step = run.batches(), 0
    while step < 4:
        next(batches)
        step += 1


class Trainer:
    """As a base class has it, whose subclasses say what a step is."""

    first = 0

    def train(self, run: Run) -> None:
        self.batches = run.batches()
        for self.iter in range(self.first, 4):  # noqa: B020 - as people write it
            self.train_one()

    def train_one(self) -> None:
        next(self.batches)


def from_the_finished_steps(run: Run) -> None:
    batches = run.batches()
    for step in range(run.step, run.step + 4):
        print(step, next(batches))


def from_the_finished_steps_of_an_epoch(run: Run) -> None:
    batches = run.batches()
    for step in range(run.step % 7, 7):
        print(step, next(batches, None))


def counts_the_finished_steps(run: Run) -> None:
    batches, step = run.batches(), run.step
    while step < 14:
        if next(batches, None) is None:
            break
        step += 1


def keeps_its_count(run: Run) -> None:
    batches, kept = run.batches(), Kept(step=0)
    while kept.step < 4:
        next(batches)
        kept.step += 1


def passes_its_count_in(run: Run) -> None:
    batches, passed_in.step = run.batches(), 0
    while passed_in.step < 4:
        next(batches)
        passed_in.step += 1


def accumulates(run: Run) -> None:
    batches = run.batches(accumulate=2)
    for _ in batches:
        for part in range(2):
            print(part)
            if part == 0:
                next(batches)


def in_several_runs(run: Run) -> None:
    for fold in range(1):
        for batch in run.batches():
            print(fold, batch)


@pytest.mark.parametrize("place", [0, 10])
@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (over_a_range, "step"),
        (lambda run: behind_a_progress_bar(run, tqdm), "step"),
        (over_a_count, "step"),
        (while_there_are_steps, "step"),
        (from_the_finished_steps, None),
        (from_the_finished_steps_of_an_epoch, None),
        (counts_the_finished_steps, None),
        (keeps_its_count, None),
        (passes_its_count_in, None),
        (accumulates, None),
        (in_several_runs, None),
    ],
)
def test_rounds_that_take_the_batches_are_told(loop: Callable[[Run], None], name: str | None, place: int) -> None:
    run = Run(place)
    loop(run)
    assert len(run.messages) == (name is not None)
    assert all(message.startswith(f"the loop counts its batches in {name}, which starts") for message in run.messages)


@pytest.mark.parametrize("place", [0, 10])
def test_rounds_whose_start_is_computed_are_told_where_it_is_not_the_finished_steps(place: int) -> None:
    run = Run(place)
    Trainer().train(run)
    assert len(run.messages) == (place > 0)
    assert all("in self.iter, which" in message for message in run.messages)


def tqdm(numbers: Any) -> Any:
    yield from numbers
