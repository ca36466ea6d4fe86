"""The trainer: takes a job and a task to trained weights, through any number of stops.

Read it from top to bottom: the training loop, setup, resume, evaluation and saving, the end.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from cluster_ddp.job import BatchPlan, JobSpec, describe_training, scaled_lr
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, on_this_host
from cluster_ddp.run.phase import Phase
from cluster_ddp.train.buffers import Buffers
from cluster_ddp.train.checks.step_checks import StepChecks
from cluster_ddp.train.checks.unsuited_optimizers import refuse_other_passes
from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.data.sets import ids_of_sets
from cluster_ddp.train.data.streams import MapStream, Stream, agree_on_batches, open_stream
from cluster_ddp.train.ema import Ema
from cluster_ddp.train.errors import NonFiniteError
from cluster_ddp.train.evaluation.evaluate import BeforeEvaluation, Evaluation, FrozenWeights, mark_of
from cluster_ddp.train.evaluation.metric_names import metric_names
from cluster_ddp.train.evaluation.weights import evaluation_weights_of, make_optimizer, weights_to_evaluate
from cluster_ddp.train.metrics.log import Log
from cluster_ddp.train.model import prepare_model, settle_layouts, without_sync, wrap
from cluster_ddp.train.nonfinite import NonFiniteCheck
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.overlap import Overlap
from cluster_ddp.train.precision import choose_precision, make_scaler, set_backends
from cluster_ddp.train.profiling import Profiler
from cluster_ddp.train.randomness import OwnGenerators, StepSeeds, Use, derive, keep_generators, seed_everything
from cluster_ddp.train.ranks.communicating import IN_PREPARE, Alone, Communicating
from cluster_ddp.train.ranks.distributed import all_gather_object, barrier, describe_ranks, find_world
from cluster_ddp.train.ranks.process import RankProcess
from cluster_ddp.train.ranks.stop import AT_ONCE
from cluster_ddp.train.schedule import Schedule
from cluster_ddp.train.session import Outcome, Session
from cluster_ddp.train.state.training import State
from cluster_ddp.train.step import Gradients
from cluster_ddp.train.task import Task, expect_type
from cluster_ddp.train.update import Update

Batches = Iterator[tuple[MicroBatch, Any]]


class Trainer:
    """Trains a task as configured by a job. Every rank creates one after `setup_distributed` and calls `run`.

    Parameters
    ----------
    job
        The settings.
    task
        The task to train.
    run
        Where checkpoints, metrics and events are written; None, for use as a library, writes nothing.
    attempt
        The number of this attempt of the run.
    process
        This rank's signal handlers and heartbeat file; with None, training cannot be asked to stop.

    Attributes
    ----------
    model
        The bare (unwrapped) model, with the weights after the last step.
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
        self.job, self.task, self.directory, self.attempt = job, task, run, attempt
        self.world = find_world()
        self.device = self.world.device
        writer = EventWriter(run, on_this_host(f"rank-{self.world.rank}")) if run else None
        self.communicating = Communicating()
        self.session = Session(job, run, attempt, process or RankProcess(), writer)
        self._build()

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.session.step

    def run(self) -> Outcome:
        """Train to the end or until stopped; either way, the state after the last step is saved.

        Raises
        ------
        ClusterDDPError
            An error that the user can fix.
        """
        self._resume()
        batches = self.stream.batches(self.step, self.state.counts, self.state.at_first)
        try:
            self._train(batches)
            return self._end(batches)
        except BaseException as error:
            if isinstance(error, NonFiniteError):  # all ranks raise it after the same step
                self.log.flush()
            self.log.close(failed=True)
            self.session.repeated.close()
            raise
        finally:
            self.stream.close()
            self.profiler.close()

    def _train(self, batches: Batches) -> None:
        """Train until all steps are done, or all ranks agree to stop."""
        self._evaluate_and_save()  # a stop may have interrupted the evaluation of the step that we resume from
        if self.session.decision.stops:
            return
        self.session.beat.enter(Phase.TRAINING)
        for micro, batch in batches:
            if micro.number == 0:
                self.profiler.begin(micro.step)
                self.session.begin_step()  # the votes travel while the step is computed
                self.log.begin(micro.step)
                self.buffers.send()
                self.buffers.keep()
                self.overlap.begin()
                if not self.overlap.is_allowed:
                    self.session.saving.wait_for_staging()

            self._compute(micro, batch)
            self.log.record_samples(micro)
            if not micro.last:
                continue

            self.gradients.finish()
            self.checks.check_gradients()
            self.session.repeated.note_gradients(micro.step + 1, self.model.parameters())
            self.overlap.end()
            # Checks earlier updates only: on a GPU their results have arrived by now, so the host need not wait.
            skipped = self.nonfinite.check(micro.step)
            self.schedule.apply(micro.step - skipped)  # a skipped update does not advance the schedule
            self.update.clip()  # changes only gradients, so a save may still be copying the weights
            self.session.saving.wait_for_staging()  # the update must not change weights that a save is still copying
            was_skipped = self.update.step(expects_gradients=self.gradients.is_computed)  # skipped if not finite
            self.buffers.put_back(was_skipped)
            if self.ema is not None:
                self.ema.update(was_skipped)  # averages the updated weights
            self.profiler.end(micro.step)  # includes only what every step does
            self.checks.end(micro.step + 1)

            decision = self.session.end_step()
            self.log.end(micro.step + 1, micro.epoch, self.update, self.schedule.lr(micro.step - skipped))
            if decision.synced:  # the ranks have just exchanged their votes, so all of them are here
                self.log.exchange()
            self._evaluate_and_save()
            if self.session.decision.stops:
                return

    def _compute(self, micro: MicroBatch, batch: Any) -> None:
        """Add the gradients of a micro-batch."""
        self.seeds.apply(micro.step, micro.number)  # last before the forward: anything else may draw numbers
        with without_sync(self.wrapped, micro.last):  # also around the forward, where DDP decides whether to sync
            with self.precision.autocast(), self.checks.computing():
                loss = self.task.loss(self.wrapped, batch)
            self.gradients.backward(loss, micro, self.log.step_loss)
        if micro.last:
            self.session.repeated.note(micro.step + 1, self.gradients.last)

    # Setup.

    def _build(self) -> None:
        """Build everything, in an order that never changes: what is built draws numbers, and each part is reseeded."""
        set_backends(self.job.train, self.device)
        is_apart = any(all_gather_object(self.world.local_rank))  # whether there are ranks that do not call it
        if self.world.local_rank == 0:
            with Alone(IN_PREPARE) if is_apart else contextlib.nullcontext():
                self.task.prepare()
        barrier()
        self.plan: BatchPlan = agree_on_batches(self.job.train, self.directory, self.world)
        self._build_model()
        self._build_data()
        self._build_update()
        self._build_state()
        self.profiler = Profiler(self.job.train.profile, self.directory, self.attempt, self.world)
        self.log = Log(self.job, self.directory, self.attempt, self.world, self.stream, self.device, self.wrapped)

    def _build_model(self) -> None:
        train, world, device = self.job.train, self.world, self.device
        self.model = prepare_model(self._make_model(self.task), train, device)
        self.ema = Ema(self.model, train.ema_decay) if train.ema_decay is not None else None
        self.wrapped = wrap(self.model, train, world, device)
        self.precision = choose_precision(train, device)

    def _build_data(self) -> None:
        train, world, device = self.job.train, self.world, self.device
        self._seed(Use.TRAIN_DATA)
        self.stream: Stream = open_stream(self.task, train, self.plan, world, device, self.session.warn)
        order = self.stream.order if isinstance(self.stream, MapStream) else None
        self.checks = StepChecks(self.model, self.wrapped, train, self.plan, order, self.session.warn)
        self._seed(Use.EVAL_DATA)
        self.evaluation = Evaluation.of(self.task, train, self.plan, world, self.precision, device)
        if self.evaluation is not None and self.ema is not None and (remark := self.ema.remark()) is not None:
            self.session.warn(remark)
        names = [] if self.evaluation is None else metric_names(self.task.evaluate)
        if names is not None:  # otherwise the first evaluation shows them
            self.session.saving.check_metric([f"val/{name}" for name in names])

    def _build_update(self) -> None:
        train = self.job.train
        lr = scaled_lr(train, self.plan.global_batch)
        self.task.weight_decay = train.weight_decay
        self._seed(Use.OPTIMIZER)
        with self.communicating.watched():
            self.optimizer = make_optimizer(self.task, self.model, lr)
        refuse_other_passes(self.optimizer)
        self.schedule = Schedule(train, self.optimizer, peak=lr, total=self.stream.total_steps, warn=self.session.warn)
        self.scaler = make_scaler(train, self.precision)
        parameters = list(self.model.parameters())  # including those that are frozen now
        compressed = train.comm_hook != "none"
        self.gradients = Gradients(
            parameters, self.scaler, world_size=self.world.world_size, device=self.device, compressed=compressed
        )
        self.update = Update(self.optimizer, parameters, clip_norm=train.clip_norm, scaler=self.scaler)
        self.buffers, self.frozen_weights = Buffers(self.model), FrozenWeights(self.model)
        self.overlap = Overlap(self.optimizer, self.device)
        self.nonfinite = NonFiniteCheck(train.max_bad_steps, self.update, self.gradients, self.model)

    def _build_state(self) -> None:
        around = generators_around([self.task, *self.model.modules(), self.optimizer])
        own = OwnGenerators(self.task, self.model, self.optimizer, around=around)
        self.seeds = StepSeeds(self.job.train.seed, self.world.rank, self.device, own)
        self.evaluation_weights = evaluation_weights_of(self.model, self.optimizer) if self.ema is None else None
        averages = self.ema or self.evaluation_weights
        self.state = State(
            self.model,
            self.optimizer,
            scaler=self.scaler,
            ema=averages,
            also=self.task,
            seeded=own,
            wrapped=self.wrapped,
            read=ids_of_sets(self.stream.data, None if self.evaluation is None else self.evaluation.data),
            communicating=self.communicating,
        )

    def _seed(self, use: Use) -> None:
        """Reseed, so that what is built next draws the same numbers in every attempt.

        What was built before may have drawn a different amount, such as a model whose pretrained weights were not
        cached yet.
        """
        seed_everything(derive(use, self.job.train.seed))

    def _make_model(self, task: Task) -> nn.Module:
        """Build the model in the initial state that is the same on all ranks and in all attempts."""
        self._seed(Use.BUILD)
        with self.communicating.watched():
            return expect_type(task.model(), nn.Module, "model()")

    def _make_fresh_state(self) -> State:
        """Build the state as a new process would, on the CPU, without touching the task that is training."""
        train, task = self.job.train, copy.copy(self.task)
        with keep_generators():
            model = self._make_model(task)
            ema = Ema(model, train.ema_decay) if train.ema_decay is not None else None
            self._seed(Use.OPTIMIZER)
            optimizer = make_optimizer(task, model, scaled_lr(train, self.plan.global_batch))
        averages = ema or evaluation_weights_of(model, optimizer)
        state = State(model, optimizer, scaler=make_scaler(train, self.precision), ema=averages, also=task)
        before = dict(vars(task))
        self.state.put_back_first(task, state)
        self.session.saving.unsaved.made_from.put_back(before, task)
        return state

    # Resume.

    def _resume(self) -> None:
        self.session.beat.enter(Phase.READY)
        self.wrapped.train()
        if self.world.world_size > 1:
            accumulates = self.plan.accumulation_steps > 1
            settle_layouts(self.wrapped, self.task, self.world.world_size, accumulates=accumulates)
        self.session.saving.unsaved.made_from = self.stream.made_from(self.model)
        metrics = self.session.resume(
            self.state, self.stream, total_steps=self.stream.total_steps, make_fresh=self._make_fresh_state
        )
        if self.step > (total := self.stream.total_steps):
            self.session.warn(
                f"training ends at step {total} now, and the checkpoint is of step {self.step}: no step is left, and "
                f"the weights are not those of a run of {total} steps"
            )
        self.session.saving.unsaved.note_restored()
        self.checks.resume(self.step)
        skipped, bad_in_a_row = self.state.counts.skipped, self.state.counts.bad_in_a_row
        self.update.restore(skipped, bad_in_a_row)
        if self.step:  # loss() may read the rate, which is still that of the last update
            self.schedule.apply(self.step - 1 - (skipped - bool(bad_in_a_row)))
        self.log.open(self.step, metrics)
        setup = describe_training(self.job.train, self.plan)
        self.log.say(setup, *describe_ranks(self.world))
        self.session.record_start(training=setup)
        if self.evaluation_weights is not None:
            self.session.warn(self.evaluation_weights.remark())

    # Evaluation and saving, between steps.

    def _evaluate_and_save(self) -> None:
        was_evaluated = False
        if self._evaluation_is_due() and not self.session.decision.stops:
            self._evaluate()
            was_evaluated = not self.session.decision.stops
        # Checkpoints record metrics for keep_best; one that a stop saved before the evaluation of its step lacks them.
        needs_metrics = self.job.checkpoint.keep_best is not None or self.session.saving.has_saved(self.step)
        if self.session.save_is_due or (was_evaluated and needs_metrics):
            self._save(again=was_evaluated)

    def _evaluation_is_due(self) -> bool:
        step, stream = self.step, self.stream
        if self.evaluation is None or step == 0 or self.state.counts.evaluated_step == step:
            return False
        return self.evaluation.is_due(step, total=stream.total_steps, per_epoch=stream.steps_per_epoch)

    def _evaluate(self) -> None:
        """Evaluate; if a stop interrupts it, the evaluation is repeated after the resume."""
        assert self.evaluation is not None
        self.log.flush()
        self.session.beat.enter(Phase.EVALUATING)
        self.buffers.send()  # each rank has its own BatchNorm statistics
        model = self.model if self.ema is None else self.ema.model()
        before = BeforeEvaluation(self.model, model, self.buffers, self.frozen_weights, self.task, self.state.modes)
        mark = mark_of(self.state, before.frozen) if self.step == self.session.repeated.resumed else None
        with weights_to_evaluate(self.optimizer) if self.ema is None else contextlib.nullcontext():
            values = self.evaluation.run(model, self.session.continue_check())
        self.checks.evaluated()
        if values is None:
            before.put_back()
        else:
            if mark is not None and mark_of(self.state, before.frozen) != mark:
                self.session.repeated.compare_nothing()
            self.state.counts.evaluated_step = self.step
            named = {f"val/{name}": value for name, value in values.items()}
            self.session.saving.check_metric(named)
            self.session.saving.unsaved.look_after_evaluation(self.state)
            self.log.record_evaluation(self.step, self.stream.epoch(self.step - 1), named)
        self.session.beat.enter(Phase.TRAINING)

    def _save(self, *, again: bool = False) -> None:
        self.nonfinite.check_weights(self.step)
        self.log.flush()
        if self.evaluation_weights is not None:
            self.session.saving.wait_for_staging()  # a save of this step may still be running
            self.evaluation_weights.refresh()
        counts = self.state.counts
        self.stream.note_place(counts)
        counts.skipped, counts.bad_in_a_row = self.update.tally()
        current = counts.evaluated_step == self.step
        metrics = {name: value for name, value in self.log.latest.items() if current or not name.startswith("val/")}
        self.session.save(metrics, again=again)

    # The end.

    def _end(self, batches: Batches) -> Outcome:
        """Save the last step, wait until it is durable, and report how training ended."""
        self.log.flush()
        decision = self.session.decision
        completed = self.step >= self.stream.total_steps and not self._evaluation_is_due()
        self.session.end(self._save, completed=completed)
        has_time = decision.stops and not completed and self.session.has_time()
        self.log.close(failed=False, wait=decision.level < AT_ONCE)
        self.session.beat.enter(Phase.DONE)
        if has_time:
            self._note_next_step(batches)
        self.session.close()
        return Outcome(completed, self.step, decision.reason, decision.level >= AT_ONCE, dict(self.log.latest))

    def _note_next_step(self, batches: Batches) -> None:
        """Compute the loss and gradients that a resume begins with, to be compared; all is saved, whatever happens."""
        self.log.begin(self.step)
        self.buffers.send()
        self.buffers.keep()
        with contextlib.suppress(Exception, SystemExit):
            for micro, batch in batches:
                self._compute(micro, batch)
                if micro.last:
                    break
            self.gradients.finish()
            self.session.repeated.note_gradients(self.step + 1, self.model.parameters())
        self.buffers.put_back(True)
        self.model.zero_grad()
