"""The trainer: from a job and a task to trained weights, through any number of stops.

It reads from top to bottom: what is built, what is resumed, the loop, one step, and what happens between steps.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cluster_ddp.run import events
from cluster_ddp.run.board import Phase
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.spec import BatchPlan, JobSpec
from cluster_ddp.train.batching import agree_on_batches
from cluster_ddp.train.distributed import barrier, find_world
from cluster_ddp.train.ema import Ema
from cluster_ddp.train.errors import NonFiniteError, TrainError
from cluster_ddp.train.evaluation import Evaluation
from cluster_ddp.train.feed import Feed, open_feed
from cluster_ddp.train.guard import Guard
from cluster_ddp.train.log import Log
from cluster_ddp.train.objective import Objective, scalar_loss
from cluster_ddp.train.outcome import Outcome
from cluster_ddp.train.precision import choose_precision, make_scaler, set_backends
from cluster_ddp.train.profiling import Profiler
from cluster_ddp.train.randomness import StepSeeds, Use, derive, seed_everything
from cluster_ddp.train.rank import RankProcess
from cluster_ddp.train.sampler import Share
from cluster_ddp.train.saving import Saving, synchronise_buffers
from cluster_ddp.train.schedule import Schedule, scaled_lr
from cluster_ddp.train.state import State
from cluster_ddp.train.stop import AT_ONCE, Agreed, Agreement
from cluster_ddp.train.task import Task, given
from cluster_ddp.train.update import Update
from cluster_ddp.train.warmup import settle_buckets
from cluster_ddp.train.wrapping import prepare_model, without_sync, wrap

_RETRY_AFTER = (1.0, 3.0, 0.0)  # seconds between the tries to save the last step


class Trainer:
    """Trains a task as a job says. Every rank makes one, after `setup_distributed`, and calls `run`.

    Parameters
    ----------
    job
        The settings.
    task
        The problem.
    run
        Where checkpoints, metrics and events go; None: nowhere, for use as a library.
    attempt
        The number of this attempt of the run.
    process
        The signals and the board of this rank; None: nothing but its end stops this training.

    Attributes
    ----------
    step
        Steps that are finished.
    model
        The bare model, with the weights of that step.
    """

    def __init__(
        self,
        job: JobSpec,
        task: Task,
        run: RunDirectory | None = None,
        attempt: int = 0,
        *,
        process: RankProcess | None = None,
    ) -> None:
        self.step = 0
        self.job, self.task, self.directory, self.attempt = job, task, run, attempt
        self.process = process or RankProcess()
        self.world = find_world()
        self.device = self.world.device
        self.events = EventWriter(run, f"rank-{self.world.rank}") if run else None
        self._build()

    def run(self) -> Outcome:
        """Train to the end, or to a stop; either way the state of the last step is saved.

        Raises
        ------
        ClusterDDPError
            Something that the user can put right.
        """
        self._resume()
        try:
            agreed = self._train()
            return self._end(agreed)
        except BaseException as error:
            if isinstance(error, NonFiniteError):  # which all ranks raise after the same step
                self.log.flush()
            self.log.close(failed=True)
            raise
        finally:
            self.feed.close()
            self.profiler.close()

    # What is built.

    def _build(self) -> None:
        train, world, device = self.job.train, self.world, self.device
        set_backends(train)
        if world.local_rank == 0:
            self.task.prepare()
        barrier()
        self.plan: BatchPlan = agree_on_batches(train, self.directory, world)

        seed_everything(derive(Use.BUILD, train.seed))
        self.model = prepare_model(given(self.task.model(), nn.Module, "model()"), train, device)
        self.ema = Ema(self.model, train.ema_decay) if train.ema_decay is not None else None
        self.wrapped = wrap(self.model, train, world, device)
        self.feed: Feed = open_feed(self.task, train, self.plan, world, device)
        self.precision = choose_precision(train, device)
        self.evaluation = Evaluation.of(self.task, train, self.plan, world, self.precision, device)

        lr = scaled_lr(train, self.plan.global_batch)
        self.task.weight_decay = train.weight_decay
        self.optimizer = given(self.task.optimizer(self.model, lr), Optimizer, "optimizer()")
        self.schedule = Schedule(train, self.optimizer, peak=lr, total=self.feed.total_steps)
        scaler = make_scaler(train, self.precision)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.objective = Objective(trainable, scaler, world_size=world.world_size, device=device)
        self.update = Update(self.optimizer, trainable, clip_norm=train.clip_norm, scaler=scaler)
        self.guard = Guard(train.max_bad_steps, self.update, self.objective, self.model)

        self.seeds = StepSeeds(train.seed, world.rank, device)
        self.state = State(self.model, self.update, self.ema, self.task)
        self.saving = Saving(self.job, self.directory, self.events, self.attempt, world)
        if self.evaluation is None:
            self.saving.check_metric({})
        self.agreement = self._new_agreement()
        self.profiler = Profiler(train.profile, self.directory, self.attempt, world)
        self.log = Log(self.job, self.directory, self.attempt, world, self.feed, device, self.wrapped)

    def _new_agreement(self) -> Agreement:
        return Agreement(
            self.process.stop, self.saving.is_wanted, rank=self.world.rank, world_size=self.world.world_size
        )

    # What is resumed.

    def _resume(self) -> None:
        self.process.beat.enter(Phase.READY)
        self.wrapped.train()
        if self.world.world_size > 1:
            settle_buckets(self.wrapped, self.task, self._first_loss)
        restored = self.saving.restore(self.state)
        if restored is not None:
            self.step = restored.step
        self.log.open(self.step)
        self._tell(
            events.STARTED if restored is None else events.RESUMED,
            world_size=self.world.world_size,
            total_steps=self.feed.total_steps,
        )

    def _first_loss(self) -> Any:
        share, batch = self.feed.first()
        self.seeds.apply(share.step, share.micro_batch)
        with self.precision.autocast():
            loss = self.task.loss(self.wrapped, batch)
        return scalar_loss(loss[0] if isinstance(loss, tuple) else loss)

    # The loop.

    def _train(self) -> Agreed:
        """Train until all steps are done (level 0 is returned) or all ranks agree to stop."""
        agreed = self._between_steps(Agreed())  # a stop may have cut an evaluation short
        if agreed.level:
            return agreed
        self.process.beat.enter(Phase.TRAINING)
        for share, batch in self.feed.batches(self.step, self.state.counts):
            if share.micro_batch == 0:
                self._begin_step(share.step)
            self._learn(share, batch)
            if share.last:
                agreed = self._end_step(share)
                if agreed.level:
                    return agreed
        return Agreed()

    # One step.

    def _begin_step(self, step: int) -> None:
        self.profiler.begin(step)
        self.agreement.begin(step)
        self.log.begin(step)

    def _learn(self, share: Share, batch: Any) -> None:
        """Go forward and backward with one micro-batch."""
        self.seeds.apply(share.step, share.micro_batch)
        self.log.take(share)
        with without_sync(self.wrapped, share.last):
            with self.precision.autocast():
                loss = self.task.loss(self.wrapped, batch)
            self.objective.backward(loss, share, self.log.step_loss)

    def _end_step(self, share: Share) -> Agreed:
        """Make the update, then do what is due after this step."""
        self.objective.finish()
        skipped = self.guard.check(share.step)
        self.schedule.apply(share.step - skipped)
        self.saving.wait_copied()
        self.update.apply()
        if self.ema is not None:
            self.ema.update()
        self.profiler.end(share.step)
        self.step = share.step + 1
        self.process.beat.step(self.step)
        self.log.end(self.step, share.epoch, self.update, self.schedule.lr(share.step - skipped))
        self.saving.prepare(self.state)
        agreed = self.agreement.end(share.step)
        if agreed.asked:
            self.log.exchange()
        return self._between_steps(agreed)

    # Between steps.

    def _between_steps(self, agreed: Agreed) -> Agreed:
        evaluated = False
        if self._evaluation_is_due() and not agreed.level:
            agreed = self._evaluate()
            evaluated = not agreed.level
        if agreed.save or self.saving.is_due(self.step) or (evaluated and self.job.checkpoint.keep_best is not None):
            self._save(again=evaluated)
        return agreed

    def _evaluation_is_due(self) -> bool:
        if self.evaluation is None or self.step == 0 or self.state.counts.evaluated_step == self.step:
            return False
        every = self.job.train.evaluate_every
        if every == "epoch":
            every = self.feed.steps_per_epoch or self.feed.total_steps
        return self.step >= self.feed.total_steps or (every != "end" and self.step % int(every) == 0)

    def _evaluate(self) -> Agreed:
        """Evaluate; a stop abandons it, and it is done again after the resume."""
        assert self.evaluation is not None
        self.log.flush()
        self.process.beat.enter(Phase.EVALUATING)
        model = self.ema.model if self.ema is not None else self.model
        synchronise_buffers(model)
        agreement, agreed = self._new_agreement(), Agreed()

        def go_on(batch: int) -> bool:
            nonlocal agreed
            self.process.beat.step(self.step)
            agreement.begin(batch)
            agreed = agreement.end(batch)
            return agreed.level == 0

        values = self.evaluation.run(model, go_on)
        if values is not None:
            self.state.counts.evaluated_step = self.step
            named = {f"val/{name}": value for name, value in values.items()}
            self.saving.check_metric(named)
            self.log.evaluated(self.step, self.feed.epoch(self.step - 1), named)
        self.process.beat.enter(Phase.TRAINING)
        return agreed

    def _save(self, *, again: bool = False) -> None:
        self.guard.check_weights(self.step)
        self.log.flush()
        before = self.process.beat.phase
        self.process.beat.enter(Phase.SAVING)
        fresh = self.state.counts.evaluated_step == self.step
        metrics = {name: value for name, value in self.log.latest.items() if fresh or not name.startswith("val/")}
        self.saving.save(
            self.state,
            step=self.step,
            samples=self.feed.consumed(self.step),
            epoch=self.feed.epoch(self.step),
            metrics=metrics,
            again=again,
        )
        self.process.beat.enter(before)

    # The end.

    def _end(self, agreed: Agreed) -> Outcome:
        """Save the last step, see it durable, and say how it ended."""
        self.log.flush()
        self.process.beat.enter(Phase.STOPPING)
        if agreed.level:
            self._tell(events.STOP_REQUESTED, reason=agreed.reason)
        durable = self._save_for_good()
        completed = self.step >= self.feed.total_steps and not self._evaluation_is_due()
        if completed and not durable:
            raise TrainError(
                f"all {self.step} steps are done, but their checkpoint could not be written; make room on the storage "
                "of the run and resume it"
            )
        self._tell(events.COMPLETED if completed else events.STOPPED, reason=agreed.reason)
        self.log.close(failed=False, wait=agreed.level < AT_ONCE)
        self.saving.close()
        self.process.beat.enter(Phase.DONE)
        return Outcome(completed, self.step, agreed.reason, agreed.level >= AT_ONCE, dict(self.log.latest))

    def _save_for_good(self) -> bool:
        """Save the last step; False when the storage does not take it, which it may do after a moment."""
        for pause in _RETRY_AFTER:
            self._save()
            if self.saving.finish():
                return True
            time.sleep(pause)
        return False

    def _tell(self, event: str, **fields: Any) -> None:
        """Record an event, on rank 0."""
        if self.world.is_main and self.events is not None:
            self.events.write(event, attempt=self.attempt, step=self.step, **fields)
