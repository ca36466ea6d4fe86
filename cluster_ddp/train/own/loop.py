"""What happens around each step of a custom loop: seeding, saving, and the stop that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

import torch

from cluster_ddp.run.phase import Phase
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.after_loop import GOES_ON_FROM_OTHERS, AfterLoop
from cluster_ddp.train.own.beginning import Beginning
from cluster_ddp.train.own.by_hand import UpdatesByHand
from cluster_ddp.train.own.data.same_data import SameData
from cluster_ddp.train.own.geometry import Deal, Draws, Geometry
from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.leaving import LeaveBlock, Leaving
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.rank_buffers import RankBuffers
from cluster_ddp.train.own.skipped_updates import SkippedUpdates
from cluster_ddp.train.own.zero_gradients import ZeroGradients
from cluster_ddp.train.randomness import OwnGenerators, StepSeeds, Use, derive, mix, seed_everything
from cluster_ddp.train.ranks.distributed import broadcast_object
from cluster_ddp.train.ranks.stop import AT_ONCE, StopDecision
from cluster_ddp.train.session import Session

_OTHER_LOOP = (
    "the checkpoint was saved by another kind of loop (resumable(), steps() or resume()): use a separate run or "
    "folder for this one"
)

_PATIENCE = 500  # batches without an update


class Save(Protocol):
    """Saves the state after the last finished step."""

    def __call__(self, *, again: bool) -> None:
        """Save; with `again`, even if this step has already been saved."""


class Loop:
    """The steps of one custom loop, and its state together with that of the objects passed in.

    Parameters
    ----------
    session
        This rank's session.
    save
        Saves the state after the last finished step.
    kept
        The values passed to ``run.keep``.
    passed_in
        The objects passed in.
    deal
        How the samples of an epoch are dealt out to the ranks; None if unknown.
    max_bad_steps
        ``train.max_bad_steps``.

    Attributes
    ----------
    seed
        Determines all random numbers: what the program passed to `torch.manual_seed`, else the job file's seed.
    batches
        Batches begun in this attempt.
    is_closed
        Whether the code after the last batch of the previous epoch has run.
    is_over
        Whether the restored checkpoint was saved at the end of the block, so that there is nothing left to do.
    data
        Checks that the data are those with which the checkpoint was saved.
    data_numbers, first_numbers
        The numbers in the data and its sampler when this epoch's batches began, and the run's first; see `ChangedData`.
    generators
        Random generators held by the models themselves, seeded along with the global ones.
    kept
        The values passed to ``run.keep``.
    left_for_stop
        Whether the block was left because all ranks agreed to stop.
    before_save
        Called before each save, to bring the kept values up to date.
    after_step
        Called after each step, with whether an optimizer stepped in it; inspects the program around the loop.
    on_update
        Called after each update.
    beginning
        Checks that the loop begins where it has to.
    leaving
        Where this rank waits for the others when it leaves an epoch or the loop.
    after_loop
        Notes whether code after the loop changes the weights.
    """

    def __init__(
        self,
        session: Session,
        save: Save,
        geometry: Geometry | Draws,
        kept: KeptValues,
        passed_in: PassedIn,
        *,
        deal: Deal | None,
        max_bad_steps: int,
    ) -> None:
        self._session, self._save_state, self._geometry, self.kept = session, save, geometry, kept
        self._passed_in, self._deal = passed_in, deal
        self._rank_buffers = RankBuffers(passed_in.modules, passed_in.wrapped, session.world, session.warn)
        self._zero_gradients = ZeroGradients(list(passed_in.model.parameters()))
        self.seed = broadcast_object(torch.initial_seed())  # before anything has seeded a step
        self.generators = OwnGenerators(passed_in.model, *passed_in.optimizers)
        self._skipped_updates = SkippedUpdates(passed_in.scalers, max_bad_steps)
        self._by_hand = UpdatesByHand(passed_in.optimizers)
        self._seeds: StepSeeds | None = None
        self._stop = StopDecision()
        self.batches = 0
        self.data = SameData(self.warn)
        self.data_numbers: dict[str, Any] | None = None
        self.first_numbers: dict[str, Any] | None = None
        self.is_closed = self.is_over = self.left_for_stop = False
        self._is_finished = False  # the block has reached its end
        self._is_dirty = False  # something may have changed since the state was saved or restored
        self._is_updated = self._save_is_due = False
        self._waited = 0  # batches that a save or a stop has waited for an update
        self.leaving = Leaving(session.world, self.warn)
        self.after_loop = AfterLoop(passed_in.model)
        self.beginning = Beginning(draws_itself=isinstance(geometry, Draws))
        self.before_save: Callable[[], None] = lambda: None
        self.after_step: Callable[[bool], None] = lambda updated: None
        self.on_update: Callable[[], None] = lambda: None

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._session.step

    @property
    def replaced_signals(self) -> list[str]:
        """The signals whose handlers the program has replaced; see `StopSignals.replaced_signals`."""
        return self._session.replaced_signals

    @property
    def stop_is_agreed(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._stop.stops

    def warn(self, message: str) -> None:
        """Report a warning, on rank 0."""
        self._session.warn(message)

    def state_dict(self) -> dict[str, Any]:
        """The state of the objects passed in, and what a resume needs to know about the loop."""
        return {**self._passed_in.state_dict(), "loop": self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "geometry": asdict(self._geometry),
            "total": self._geometry.total,
            "data": self.data.first,
            "rows": self.data.rows,
            "deal": None if self._deal is None else asdict(self._deal),
            "numbers": self.data_numbers,
            "first numbers": self.first_numbers,
            "closed": self.is_closed,
            "finished": self._is_finished,
            "changed after": self.after_loop.has_changed,
            "kept": self.kept.by_rank,
            "kept in place": self.kept.in_place,
            "buffers": self._rank_buffers.state_dict(),
            "gradients": self._zero_gradients.have,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        TrainError
            Steps have different samples now, or different objects were passed in.
        """
        if "loop" not in state:
            raise TrainError(_OTHER_LOOP)
        self._load_own_state(state["loop"])
        self._passed_in.load_state_dict(state)
        if "buffers" in state["loop"]:  # not in checkpoints of older versions
            self._rank_buffers.load_state_dict(state["loop"]["buffers"])
        self._zero_gradients.restore(state["loop"].get("gradients", ""))

    def _load_own_state(self, state: dict[str, Any]) -> None:
        if state["geometry"].keys() != asdict(self._geometry).keys():
            raise TrainError(_OTHER_LOOP)
        self._geometry.expect_same_batches(state["geometry"])
        self._expect_same_deal(state)
        self.seed, self.is_closed, self._is_finished = state["seed"], state["closed"], state["finished"]
        self.data.first, self.data.rows = state.get("data"), state.get("rows")
        if state["geometry"].get("world") == self._session.world.world_size:  # else the batch size has to be different
            self.data_numbers = state.get("numbers")
            self.first_numbers = state.get("first numbers")
        total = self._geometry.total
        if total < state["total"]:
            self.warn(
                f"the training now ends at step {total}, but at {state['total']} when the checkpoint was saved: pass "
                "the epochs= (or the steps of run.steps) of the whole training in each attempt, not those that are left"
            )
        self.is_over = self._is_finished and total <= state["total"]
        if self._is_finished and not self.is_over and state.get("changed after"):
            self.warn(GOES_ON_FROM_OTHERS)
        self.kept.restore(state["kept"], state.get("kept in place", []))

    def _expect_same_deal(self, state: dict[str, Any]) -> None:
        was, ranks = state.get("deal"), state["geometry"].get("world")
        if was is None or self._deal is None or ranks == self._session.world.world_size:
            return
        if message := self._deal.changed(was, ranks):
            self.warn(message)

    def note_update(self, *_: Any) -> None:
        """Call after each step of an optimizer.

        Raises
        ------
        TrainError
            The step belongs to no batch, or was taken by a thread other than the block's.
        """
        self.beginning.expect_batch()
        self._is_updated = True
        self._by_hand.give_up()
        self.on_update()
        self.beginning.expect_thread()

    def begin(self, micro_batch: int) -> None:
        """Call before the computation on a batch, with its number within the step."""
        if self._seeds is None:
            world = self._session.world
            self._seeds = StepSeeds(self.seed, world.rank, world.device, self.generators)
        if micro_batch == 0:
            self._session.beat.enter(Phase.TRAINING)
            self._session.begin_step()
        self._is_updated = self.is_closed = self._is_finished = False
        self._is_dirty = True
        self.batches += 1
        self.beginning.batch()
        self._seeds.apply(self._session.step, micro_batch)
        self._by_hand.begin()

    def end(self, *, last: bool = False) -> None:
        """Call when a step is done; saves if a save is due.

        While gradients are being accumulated, saves and stops wait for the update. After the last batch of an epoch
        both wait for the code after the batches, which may use what they left behind; a stop saves there anyway,
        because that code may take longer than the time left.

        Parameters
        ----------
        last
            Whether this was the last batch of an epoch, so that the code after the batches still belongs to the step.

        Raises
        ------
        LeaveBlock
            All ranks agreed to stop.
        NonFiniteError
            The GradScaler has skipped too many updates in a row.
        """
        decision = self._session.end_step()
        self._is_updated = self._is_updated or self._by_hand.end()
        self._skipped_updates.check(self._session.step, updated=self._is_updated)
        self.after_step(self._is_updated)
        if decision.level > self._stop.level:
            self._stop = decision
        self._save_is_due |= self._session.save_is_due
        if not last:
            self._save_or_leave()
        elif self._stop.stops and self._is_updated:
            self.save()

    def enter(self, epoch: int) -> None:
        """Call when an epoch begins: seeds the code before its batches, so that it draws the same after a resume.

        All ranks get the same seed there, because what is decided for an epoch is decided for all of them.
        """
        self.beginning.awaits_batches = True
        seed_everything(derive(Use.EPOCH, self.seed, epoch))

    def rest(self, epoch: int) -> None:
        """Call after the batches of an epoch: seeds the code that follows, so that it draws the same after a resume."""
        self.beginning.awaits_batches = False
        seed = mix(derive(Use.EVALUATION, self.seed, epoch) ^ mix(self._session.world.rank))
        seed_everything(seed)
        self._session.beat.enter(Phase.EVALUATING)

    def seed_what_follows(self) -> None:
        """Call at the end of the block: what follows, such as the next fold, draws the same if this was complete."""
        seed_everything(derive(Use.BUILD, self.seed))

    def steps(self) -> Iterator[int]:
        """The remaining steps, numbered from 0."""
        self.beginning.begin()
        for step in range(self._session.step, self._geometry.total):
            self.begin(0)
            try:
                yield step
            except GeneratorExit:
                self.leaving.early = f"its loop in step {step} of {self._geometry.total}"
                self.abandon()
                raise
            self.end()
        self.after_loop.begin()
        self.rest(0)

    def jump(self, step: int) -> None:
        """Call when the code after an epoch has run: `step` steps count as finished, even if its loop was left early.

        Raises
        ------
        LeaveBlock
            All ranks agreed to stop.
        """
        if self.left_for_stop:  # a bare `except:` around the batches caught the first one
            raise LeaveBlock
        self.leaving.meet()
        self._session.beat.step(step)
        self.is_closed = self._is_dirty = True
        self._save_is_due |= self._session.saving.is_wanted_by_all()
        self._save_or_leave()

    def abandon(self) -> None:
        """Call when the loop is left in the middle of a step; the step counts if an optimizer has stepped in it."""
        if self._is_updated or self._by_hand.end():
            self._session.beat.step(self._session.step + 1)

    def note_exit(self) -> None:
        """Call when the program ends by sys.exit(0): a framework that drives the loop does not see it being left."""
        step, total = self._session.step, self._geometry.total
        if self.leaving.early is None and step < total:
            self.leaving.early = f"its loop in step {step} of {total}"

    def leave(self) -> None:
        """Call at the end of the block, on all ranks.

        A loop left early while a stop is requested counts as stopped: the program's own signal handler, or an
        exception handler, may have left it.

        Raises
        ------
        TrainError
            The block ended before the loop began, or the loop ran in a different thread.
        """
        self.leaving.meet()
        if (
            not self.left_for_stop
            and self._session.step < self._geometry.total
            and (asked := self._session.stop_of_any_rank()).stops
        ):
            self._session.decision = asked
            self.left_for_stop = True
        if not self.left_for_stop:
            self.beginning.expect_begun()

    def save_where_stopped(self) -> None:
        """Save at a stop; if gradients still wait for an update, leave the previous checkpoint as the one to resume."""
        if self._is_updated:
            self.save()

    def save(self) -> None:
        """Save the current state, unless it has been saved already."""
        self.before_save()
        self.kept.gather()
        self._rank_buffers.gather()
        self._zero_gradients.gather()
        self._save_state(again=self._is_dirty)
        self._is_dirty = False

    def save_at_end(self) -> None:
        """Save at the end of the block, after the code that follows the loop, unless the run was over already."""
        if not self.is_over:
            self._is_finished = self._is_dirty = True
            self.after_loop.end()
            self.save()

    def _save_or_leave(self) -> None:
        if not self._is_updated:
            self._wait()
            return
        self._waited = 0
        if self._stop.stops and not self._is_trained():
            self._session.decision = self._stop
            self.left_for_stop = True
            raise LeaveBlock
        if self._save_is_due or self._stop.stops:
            self._save_is_due = False
            self.save()

    def _is_trained(self) -> bool:
        """Whether only the code after the loop is left, and there is time for it.

        It uses variables of the loop, such as the last accuracy, which it would not find after a resume without steps.
        """
        return self._session.step >= self._geometry.total and self._stop.level < AT_ONCE

    def _wait(self) -> None:
        if self._save_is_due or self._stop.stops:
            self._waited += 1
            if self._waited == _PATIENCE:
                self.warn(
                    f"a save or a stop has waited {_PATIENCE} batches for an update, but none of the optimizers passed "
                    "in has stepped, and nothing is saved until one does. Pass in the optimizer that trains, and let "
                    "its step() update the weights"
                )
