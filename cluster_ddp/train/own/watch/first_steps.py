"""Inspects what a program holds after the first two steps of its loop, and reports what steps change unsaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from cluster_ddp.train.comm_hooks import CommHooks
from cluster_ddp.train.own.data.batches import Batches
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import one_search
from cluster_ddp.train.own.watch.before_batches import BeforeBatches
from cluster_ddp.train.own.watch.carried import Carried
from cluster_ddp.train.own.watch.copies import Copies
from cluster_ddp.train.own.watch.counts import Counts
from cluster_ddp.train.own.watch.elsewhere import Elsewhere
from cluster_ddp.train.own.watch.gradients import CarriedGradients
from cluster_ddp.train.own.watch.in_loss import InLoss
from cluster_ddp.train.own.watch.other_handlers import OtherHandlers
from cluster_ddp.train.own.watch.other_loaders import OtherLoaders
from cluster_ddp.train.own.watch.other_optimizers import OuterOptimizers
from cluster_ddp.train.own.watch.overlooked import Overlooked
from cluster_ddp.train.own.watch.queues import Queues
from cluster_ddp.train.own.watch.remembered import Remembered
from cluster_ddp.train.own.watch.rounds import Rounds
from cluster_ddp.train.own.watch.saved import Saved
from cluster_ddp.train.own.watch.schedulers import CountingSchedules, OtherSchedulers
from cluster_ddp.train.own.watch.sources import Sources
from cluster_ddp.train.randomness import OwnGenerators


class Watch(Protocol):
    """Detects one kind of state that steps change and that no checkpoint contains."""

    def first(self) -> None:
        """Call after the first step; records what is there."""

    def second(self) -> None:
        """Call after the second step; reports what has changed since."""


class FirstSteps:
    """Calls each `Watch` after the first step and after the second, then drops them.

    Parameters
    ----------
    watches
        Called in this order.
    """

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._rounds: list[list[Callable[[], None]]] = [
            [watch.first for watch in watches],
            [watch.second for watch in watches],
        ]

    def end_step(self) -> None:
        """Call after each update, from within the iterator from which the loop takes its next batch."""
        if self._rounds:
            with one_search():
                for call in self._rounds.pop(0):
                    call()


def first_steps_of(
    loop: Loop, passed_in: PassedIn, warn: Callable[[str], None], loader: Any, batches: Batches | None, remedy: str
) -> Callable[[bool], None]:
    """Create the function that watches the program around a loop, for `Loop.after_step`.

    `loader` and `batches` are None if the loop samples its batches itself.
    """

    def kept() -> Iterator[Tensor]:
        loop.before_save()
        yield from (*passed_in.tensors(), *loop.kept.tensors())

    def seeded() -> list[Any]:
        return [
            *loop.generators,
            *passed_in.generators(),
            *OwnGenerators(loader),
            *([] if batches is None else batches.generators),
        ]

    said: list[str] = []

    def tell(message: str) -> None:
        said.append(message)
        warn(message)

    gradients = CarriedGradients(passed_in.stepping, warn)
    draws_itself = loader is None
    others = list(passed_in.others.values())
    saved = Saved([*passed_in.optimizers, *others], loop.kept)
    first_batches = FirstSteps([loop.kept])
    first_updates = FirstSteps(
        [
            *([Sources(loop.kept, tell)] if draws_itself else []),
            OtherLoaders(None if batches is None else batches.data, tell),
            Overlooked(kept, seeded, tell, remedy),
            Copies(passed_in, loop.kept, tell),
            OuterOptimizers(passed_in, tell),
            Queues(passed_in, loop.kept, tell),
            OtherSchedulers(passed_in.optimizers, others, tell),
            CountingSchedules(saved, tell),
            BeforeBatches(passed_in, loop.kept, tell),
            Carried(loop.kept, tell),
            Counts(Saved(others, loop.kept), tell),
            Rounds(lambda: loop.step, tell, others),
            Elsewhere(saved, tell),
            OtherHandlers(lambda: loop.unheard, tell),
            CommHooks(passed_in.wrapped, tell),
            InLoss(saved, lambda: " ".join(said), tell),
            Remembered(Saved([passed_in.model, *saved.things], loop.kept), lambda: " ".join(said), tell),
        ]
    )

    def end_step(updated: bool) -> None:
        first_batches.end_step()
        if updated:  # while gradients accumulate, a batch changes nothing that could be seen to change
            first_updates.end_step()
        gradients.end_step(updated=updated)

    return end_step
