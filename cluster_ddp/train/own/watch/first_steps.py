"""Inspects what a program holds after the first two steps of its loop, and reports what steps change unsaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from cluster_ddp.train.objects.comm_hooks import watch_comm_hooks
from cluster_ddp.train.own.data.batches import Batches
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import one_search
from cluster_ddp.train.own.watch.before_batches import watch_before_batches
from cluster_ddp.train.own.watch.carried import watch_carried
from cluster_ddp.train.own.watch.copies import watch_copies
from cluster_ddp.train.own.watch.counts import watch_counts
from cluster_ddp.train.own.watch.elsewhere import watch_elsewhere
from cluster_ddp.train.own.watch.gradients import CarriedGradients
from cluster_ddp.train.own.watch.in_loss import watch_in_loss
from cluster_ddp.train.own.watch.in_objects import watch_in_objects
from cluster_ddp.train.own.watch.other_handlers import watch_other_handlers
from cluster_ddp.train.own.watch.other_loaders import watch_other_loaders
from cluster_ddp.train.own.watch.other_optimizers import watch_other_optimizers
from cluster_ddp.train.own.watch.other_workers import watch_other_workers
from cluster_ddp.train.own.watch.overlooked import watch_overlooked
from cluster_ddp.train.own.watch.queues import watch_queues
from cluster_ddp.train.own.watch.remembered import watch_remembered
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.rounds import watch_rounds
from cluster_ddp.train.own.watch.saved import Saved
from cluster_ddp.train.own.watch.schedulers import watch_other_schedulers, watch_schedules
from cluster_ddp.train.own.watch.sources import watch_sources
from cluster_ddp.train.randomness import OwnGenerators


class FirstSteps:
    """Lets each watch look at the program after the first step and after the second.

    Parameters
    ----------
    watches
        Called in this order. Each is a generator: up to its ``yield`` it records what is there after the first step,
        and then reports, after the second, what has changed since.
    """

    def __init__(self, watches: Sequence[Iterator[None]]) -> None:
        self._watches, self._left = watches, 2

    def end_step(self) -> None:
        """Call after each update, from within the iterator from which the loop takes its next batch."""
        if self._left:
            self._left -= 1
            with one_search():
                for watch in self._watches:
                    next(watch, None)


def first_steps_of(
    loop: Loop, passed_in: PassedIn, warn: Callable[[str], None], loader: Any, batches: Batches | None, remedy: str
) -> Callable[[bool], None]:
    """Create the function that watches the program around a loop, for `Loop.after_step`.

    `loader` and `batches` are None if the loop samples its batches itself.
    """

    gradients = CarriedGradients(passed_in.stepping, warn)
    first_batches = FirstSteps([loop.kept.watch()])
    first_updates = FirstSteps(_watches(loop, passed_in, warn, loader, batches, remedy))

    def end_step(updated: bool) -> None:
        first_batches.end_step()
        if updated:  # while gradients accumulate, a batch changes nothing that could be seen to change
            first_updates.end_step()
        gradients.end_step(updated=updated)

    return end_step


def _watches(
    loop: Loop, passed_in: PassedIn, warn: Callable[[str], None], loader: Any, batches: Batches | None, remedy: str
) -> list[Iterator[None]]:
    report = Reported(warn)

    def kept() -> Iterator[Tensor]:
        loop.before_save()
        yield from (*passed_in.tensors(), *loop.kept.tensors())

    def seeded() -> list[Any]:
        of_batches = [] if batches is None else batches.generators
        return [*loop.generators, *passed_in.generators(), *OwnGenerators(loader), *of_batches]

    others = list(passed_in.others.values())
    saved = Saved([passed_in.model, *passed_in.optimizers, *others], loop.kept)
    return [
        *([watch_sources(loop.kept, report)] if loader is None else []),
        watch_other_loaders(None if batches is None else batches.data, report),
        watch_other_workers(loader, report),
        watch_overlooked(kept, seeded, report, remedy),
        watch_copies(passed_in, loop.kept, report),
        watch_other_optimizers(passed_in, report),
        watch_queues(passed_in, loop.kept, report),
        watch_other_schedulers(passed_in.optimizers, others, report),
        watch_schedules(saved, report),
        watch_before_batches(passed_in, loop.kept, report),
        watch_carried(loop.kept, report),
        watch_counts(saved, report),
        watch_rounds(lambda: loop.step, report, saved.things),
        watch_elsewhere(saved, report),
        watch_other_handlers(lambda: loop.replaced_signals, report),
        watch_comm_hooks(passed_in.wrapped, report),
        watch_in_loss(saved, report),
        watch_remembered(saved, report),
        watch_in_objects(saved, report),
    ]
