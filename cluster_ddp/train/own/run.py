"""`ScriptRun`, the ``run`` of ``with join_run() as run:``, through which a custom loop saves, stops and resumes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cluster_ddp.job import JobSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.phase import Phase
from cluster_ddp.train.checks.unsuited_models import refuse_dtypes, refuse_sparse
from cluster_ddp.train.data.order import Order
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.metrics.log import Report, open_report
from cluster_ddp.train.model import put_gradients_in_buckets, settle_layout
from cluster_ddp.train.nonfinite import FiniteWeights
from cluster_ddp.train.own.blocks import Block, expect_group
from cluster_ddp.train.own.data.batches import Batches, batches_of, same_on_all_ranks
from cluster_ddp.train.own.data.held_data import held_rows
from cluster_ddp.train.own.geometry import Deal, Draws, Geometry, whole
from cluster_ddp.train.own.kept import Kept, KeptValues
from cluster_ddp.train.own.leaving import LeaveBlock
from cluster_ddp.train.own.loader import ResumableLoader
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.parts import AlreadyChecked, FreshState, StateWithRates
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.values import one_number
from cluster_ddp.train.own.watch.changed_data import ChangedData
from cluster_ddp.train.own.watch.first_steps import first_steps_of
from cluster_ddp.train.own.watch.mode import TrainingMode
from cluster_ddp.train.own.watch.other_optimizers import OtherOptimizers
from cluster_ddp.train.own.watch.overlooked import HAND_OVER
from cluster_ddp.train.own.watch.taking import Taking
from cluster_ddp.train.own.watch.unfrozen import Unfrozen
from cluster_ddp.train.own.wrapping import refuse_single_process
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.ranks.process import RankProcess
from cluster_ddp.train.session import Session
from cluster_ddp.train.state.stateful import Stateful
from cluster_ddp.train.state.training import State


class ScriptRun:
    """The run as seen by a program with a custom loop; created by `join_run`.

    Attributes
    ----------
    world
        Rank, local rank, world size and device of this process.
    job
        The job file's settings; the defaults under torchrun alone.
    directory, attempt
        The run's directory, and the number of this attempt.
    """

    def __init__(
        self,
        job: JobSpec,
        directory: RunDirectory,
        attempt: int,
        process: RankProcess,
        writer: EventWriter | None,
        block: Block,
    ) -> None:
        self.world, self.job = find_world(), job
        self._session = Session(job, directory, attempt, process, writer)
        self.directory, self.attempt, self._block = directory, attempt, block
        self._report = Report()
        self._check_weights: Callable[[int], None] = lambda step: None
        self._order: Order | None = None
        self._total_steps = 0
        self._was_asked_early = False  # for the step, before it was known
        self._kept = KeptValues()
        self._loop: Loop | None = None
        self._loader: ResumableLoader | None = None
        self._others: OtherOptimizers | None = None
        self._session.beat.enter(Phase.READY)

    @property
    def step(self) -> int:
        """Number of finished steps; known from `resumable`, `steps` or `resume` on."""
        self._was_asked_early |= self._order is None
        return self._session.step

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._session.decision.stops or (self._loop is not None and self._loop.stop_is_agreed)

    # Loops that run.resumable() and run.steps() drive.

    def resumable(
        self, loader: Any, *, epochs: int, accumulate: int = 1, batches: int | None = None, **things: Any
    ) -> ResumableLoader:
        """Make a loop over a DataLoader resumable, and restore the state in which the run was interrupted.

        Parameters
        ----------
        loader
            Any DataLoader, with any data set, sampler, workers and collate function. It is not modified; use the
            returned loader instead.
        epochs
            Passes over the data in the whole training.
        accumulate
            Batches per optimizer step, if more than one. Without it each batch counts as a step, and saves and stops
            wait for a batch after which the optimizer has stepped.
        batches
            Batches per epoch on each rank, if the loader has no length.
        things
            What is saved, by name: ``model=`` (wrapped in DDP if there are several ranks), ``optimizer=``, and anything
            else with ``state_dict()`` and ``load_state_dict()``, such as ``scheduler=``, ``scaler=`` and averaged
            models; also several models and optimizers, and lists of schedulers. Values of None are ignored.

        Raises
        ------
        TrainError
            Something cannot be resumed exactly, such as the loader's order or an object passed in, or the number of
            ranks has changed such that steps would have different samples.
        """
        with self._block.only_loop():
            if isinstance(loader, ResumableLoader):  # of an earlier block: a cell of a notebook runs again
                loader = loader.inner
            world, epochs = self.world.world_size, whole("epochs", epochs)
            accumulate = whole("accumulate", accumulate, 1)
            refuse_single_process(things, world)
            found = batches_of(loader, world, None if batches is None else whole("batches", batches, 1))
            batch, samples, deal = same_on_all_ranks(found)
            geometry = Geometry(epochs, -(-found.length // accumulate), batch, accumulate, world, samples)
            loop = self._take_over(things, geometry, deal)
            loop.data.expect(found.arrange(loop.seed), held_rows(found.data))
            if found.remark is not None:
                loop.warn(found.remark)
            self.watch(loop, loader, found)
            warn = self._session.warn
            taking = Taking(self._passed_in.optimizers, self._passed_in.scalers, lambda: self.step, warn)
            changed = ChangedData(
                found.data, found.samplers, warn, has_copies=getattr(loader, "persistent_workers", False)
            )
            as_now = (self._passed_in.as_now, self._kept.as_now)
            self._loader = ResumableLoader(loader, found, loop, geometry, self.step, taking, changed, as_now)
            loop.beginning.hand_out()
            return self._loader

    def steps(self, total: int, **things: Any) -> Iterator[int]:
        """Iterate over the remaining steps, numbered from 0, of a loop that samples its batches itself.

        torch, random and NumPy are seeded for each step and rank, so what the loop draws from them is exact.

        Parameters
        ----------
        total
            The step at which training ends.
        things
            What is saved, as in `resumable`.

        Raises
        ------
        TrainError
            An object that was passed in cannot be saved.
        """
        with self._block.only_loop():
            refuse_single_process(things, self.world.world_size)
            loop = self._take_over(things, Draws(whole("the number of steps", total)))
            self.watch(loop)
            loop.beginning.hand_out()
            return loop.steps()

    def keep(self, **values: Any) -> Kept:
        """Keep the loop's own values in the checkpoint, such as the best accuracy so far.

        Parameters
        ----------
        values
            Their values in a fresh run: numbers, strings, tensors, and lists and dicts of these, which may also be
            changed in place. Each rank keeps its own; after a change of the number of ranks, all take rank 0's.

        Returns
        -------
        An object with these attributes, to read and to set: ``kept = run.keep(best=0.0)``, ``kept.best = accuracy``.
        """
        if self._loop is not None:
            self._loop.beginning.expect_no_epoch(values)
        return self._kept.add(values)

    # Loops that mark where each step begins and ends.

    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        stream: Order,
        *,
        total_steps: int,
        also: Stateful | None = None,
    ) -> None:
        """Restore model and optimizer from the newest intact checkpoint, if there is one, and set `step`.

        This includes the learning rates of the optimizer's groups. Pass a torch scheduler in as `also`.

        Parameters
        ----------
        model
            The model as it is trained: wrapped in DDP if there are several ranks, in training mode.
        stream
            Says how many samples and epochs a number of steps amounts to.
        total_steps
            The step at which training ends.
        also
            Anything else to be saved, such as a scheduler or a gradient scaler; its ``state_dict()`` may contain
            tensors and whatever JSON can represent.
        """
        with self._block.only_loop():
            settle_layout(model, self.world.world_size)
            bare = model.module if isinstance(model, DistributedDataParallel) else model
            state = State(bare, optimizer, also=StateWithRates(optimizer, also))
            fresh = FreshState(state, model, optimizer, lambda twin: StateWithRates(twin, copy.copy(also)), self.world)
            self._begin(bare, state, [optimizer], stream, total_steps, fresh)

    def begin_step(self) -> None:
        """Call before the computation of a step."""
        self._session.beat.enter(Phase.TRAINING)
        self._session.begin_step()

    def end_step(self) -> bool:
        """Call after a step's update; saves if a save is due.

        Returns
        -------
        Whether all ranks agreed to stop, the same on every rank; if so, leave the loop.
        """
        self._resumed()
        stops = self._session.end_step().stops
        if not stops and self._session.save_is_due:
            self._save()
        return stops

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Announce an evaluation, so that the hang watchdog does not count it as a step.

        The next step ends it, as does the block of ``with run.evaluating():``.
        """
        evaluation = contextlib.ExitStack()
        evaluation.callback(self._session.beat.enter, self._session.beat.phase)
        self._session.beat.enter(Phase.EVALUATING)
        return evaluation

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line to metrics.jsonl; all ranks call it, with the same values: numbers, or tensors of one."""
        order = self._resumed()
        values = {name: one_number(name, value) for name, value in values.items()}
        self._session.saving.note_logged(values)
        self._report.log(step=step, samples=order.consumed(step), epoch=order.epoch(max(0, step - 1)), values=values)

    def end(self) -> None:
        """Save the last step durably and record how the run ended. Called by `join_run`."""
        self._block.is_open = False
        self._close_loop()
        expect_group(self.world.world_size)
        if self._block.has_loop:  # a block that only evaluates is not reported: training may come in the next one
            self._end_loop()
        self._session.saving.warn_not_logged()
        self._report.close(failed=False)
        self._session.close()
        if self._loop is not None:
            self._loop.seed_what_follows()

    def note_exit(self) -> None:
        """Note that the program ends by sys.exit(0). Called by `join_run`."""
        if self._loop is not None:
            self._loop.note_exit()

    def fail(self, error: BaseException | None = None) -> None:
        """Close the metrics file and loggers after an exception. Called by `join_run`."""
        self._block.is_open = False
        if isinstance(error, NameError) and self._session.is_resumed:
            self._session.warn(
                f"{error}: this attempt began at a later batch. If an earlier one sets this variable, set it before "
                "the loop as well, or keep it if training depends on it (kept = run.keep(...)), and resume"
            )
        with contextlib.suppress(Exception):
            self._close_loop()
        self._session.repeated.close()
        self._report.close(failed=True)

    # Shared by both kinds of loop.

    def take_over(self, things: Mapping[str, Any], order: Geometry | Draws) -> Loop:
        """Restore the run's state for an integration that drives the loop itself; `things` as in `resumable`."""
        with self._block.only_loop():
            refuse_single_process(things, self.world.world_size)
            return self._take_over(things, order)

    def as_now(self) -> Callable[[], None]:
        """Take a snapshot of what `take_over` was given; returns a function that restores it, as in `resumable`."""
        return self._passed_in.as_now()

    def watch(self, loop: Loop, loader: Any = None, found: Batches | None = None, remedy: str = HAND_OVER) -> None:
        """Watch for state of the program that no checkpoint contains, and report or refuse it.

        Parameters
        ----------
        remedy
            How to get what was overlooked into the checkpoint, for the message.
        """
        beat = self._session.beat
        self._others = OtherOptimizers(self._passed_in, lambda: loop.batches if beat.phase is Phase.TRAINING else None)
        loop.after_step = first_steps_of(loop, self._passed_in, loop.warn, loader, found, remedy)

    def _take_over(self, things: Mapping[str, Any], order: Geometry | Draws, deal: Deal | None = None) -> Loop:
        self._passed_in = passed_in = PassedIn(things, self.world.world_size)
        for module in passed_in.wrapped:
            settle_layout(module, self.world.world_size)
        unfrozen = Unfrozen(passed_in.wrapped)
        bad = self.job.train.max_bad_steps
        self._loop = loop = Loop(self._session, self._save, order, self._kept, passed_in, deal=deal, max_bad_steps=bad)
        loop.beginning.thread = self._block.thread
        besides = {name: thing for name, thing in passed_in.others.items() if isinstance(thing, nn.Module)}
        state = State(
            passed_in.model,
            passed_in.optimizers[0],
            also=loop,
            apart=passed_in.apart,
            others=passed_in.more,
            besides=besides,
        )
        fresh = FreshState(state, passed_in.model, passed_in.optimizers[0], AlreadyChecked, self.world)
        self._begin(passed_in.model, state, passed_in.stepping, order, order.total, fresh)
        if self.step:
            for module in passed_in.wrapped:
                put_gradients_in_buckets(module, self.world.world_size)
        for optimizer in passed_in.stepping:
            if unfrozen:
                optimizer.register_step_pre_hook(lambda *_: unfrozen.check())
            optimizer.register_step_post_hook(loop.note_update)
        if loop.is_over:
            if self.world.is_main:
                print(f"cluster-ddp: all {self.step} steps of this run are done: nothing to do", flush=True)
            raise LeaveBlock
        return loop

    def _begin(
        self,
        bare: nn.Module,
        state: State,
        optimizers: Sequence[Optimizer],
        order: Order,
        total_steps: int,
        make_fresh: Callable[[], State],
    ) -> None:
        self._order, self._total_steps = order, total_steps
        refuse_dtypes(bare)
        refuse_sparse(bare)
        self._check_weights = FiniteWeights(bare).check
        self._session.resume(state, order, total_steps=total_steps, make_fresh=make_fresh)
        mode = TrainingMode(bare, self._session.warn)
        if self.world.is_main:
            self._report = open_report(self.job, self.directory, self.attempt, self.step, loggers=self._block.is_run)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: mode.check())
        self._session.repeated.number = "the norm of the weights at"
        self._session.compared = optimizers
        self._session.record_start()
        if self._was_asked_early:
            self._session.warn(
                "the program read run.step before run.resumable(), run.steps() or run.resume(): until then it is 0 "
                "after a resume, too, so whatever begins there starts over. Read it after that call"
            )

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.leave()
            is_stopped = self._loop.left_for_stop
            self._session.end(
                self._loop.save_where_stopped if is_stopped else self._loop.save_at_end, completed=not is_stopped
            )
        else:
            is_stopped = self._session.decision.stops and self.step < self._total_steps
            self._session.end(self._save, completed=not is_stopped)
        self._block.leave(stopped=is_stopped)

    def _close_loop(self) -> None:
        if self._others is not None:
            self._others.close()
        if self._loader is not None:
            self._loader.close()

    def _save(self, *, again: bool = False) -> None:
        self._check_weights(self.step)
        self._session.save(dict(self._report.latest), again=again)
        # On a GPU the weights are still being copied. The trainer waits before its update, but a custom loop may
        # change them at any time, as do the inner steps of Reptile and the first step of SAM.
        self._session.saving.wait_for_staging()

    def _resumed(self) -> Order:
        if self._order is None:
            raise TrainError("the run has no loop yet: call resumable(), steps() or resume() first")
        return self._order
