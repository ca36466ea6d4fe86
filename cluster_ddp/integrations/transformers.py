"""Stops and resumes transformers' Trainer exactly:

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[ResumeExactly()])
    trainer.train()

The state is saved and restored like that of any other loop; the checkpoints that the Trainer writes are not affected.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from cluster_ddp.integrations.derived_trainer import DerivedTrainer
from cluster_ddp.integrations.joining import FrameworkSteps, map_batches, run_of_training
from cluster_ddp.integrations.own_callbacks import OwnCallbacks
from cluster_ddp.run.lineage import read_lineage, steps_that_count
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.data.batches import MapBatches
from cluster_ddp.train.own.data.held_data import held_rows
from cluster_ddp.train.own.kept import Kept
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.run import ScriptRun
from cluster_ddp.train.ranks.distributed import broadcast_object

# Fields of TrainerState that steps set; the others follow from the arguments.
_STATE = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# Attributes of the trainer: the averages logged next and at the end, and what is added to total_flos then.
_TRAINER = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")

_REMEDY = "Make it a part of the model that is trained"


class ResumeExactly(TrainerCallback):
    """Makes ``Trainer.train`` a loop of the run, which saves and stops between steps and resumes bit for bit.

    The run is that of the surrounding `join_run` block; without one it begins and ends with ``train``.

    Raises
    ------
    TrainError
        In ``Trainer(...)`` and ``train``, if something cannot be resumed exactly; the message names it.
    """

    def __init__(self) -> None:
        self._training: _Training | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Replace the trainer's `train`; the call stack is the only way for a callback to find its trainer."""
        trainer = _trainer_above(sys._getframe(1), self)
        _refuse_unsupported(trainer)
        train = trainer.train

        def train_exactly(resume_from_checkpoint: str | bool | None = None, *arguments: Any, **more: Any) -> Any:
            with run_of_training() as run:
                self._training = _Training(trainer, run)
                return self._training(train, resume_from_checkpoint, *arguments, **more)

        trainer.train = train_exactly

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Restore the run's state."""
        self._now().begin(state, control)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Complete the previous step, and begin the pass over the data."""
        self._now().begin_epoch()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Complete the previous step, and begin this one."""
        self._now().begin_step()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin the next batch of the step."""
        self._now().begin_micro_batch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note the update; logs, evaluations and the trainer's own checkpoints may follow."""
        self._now().end_step(evaluates=control.should_evaluate or control.should_save)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note the end of the batches; an evaluation may follow."""
        self._now().end_epoch(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write what the trainer logs to the run's metrics."""
        if self._training is not None:
            self._training.log(logs or {})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save or leave after the last step, as after any other."""
        self._now().settle()

    def _now(self) -> _Training:
        if self._training is None:
            raise TrainError("give ResumeExactly() to the Trainer as it is made: Trainer(callbacks=[ResumeExactly()])")
        return self._training


class _Training:
    """One call of `train`."""

    def __init__(self, trainer: Any, run: ScriptRun) -> None:
        self._trainer, self._run = trainer, run
        self._batches: MapBatches | None = None
        self._loop: Loop | None = None
        self._kept = run.keep(trainer={}, derived={}, callbacks=[], own_callbacks={}, has_ended=False)
        self._resumes_at = _newest_step(run)
        self._epoch = self._micro_batch = self._steps = 0
        self._is_settled = True
        self._derived: DerivedTrainer | None = None
        self._own_callbacks: OwnCallbacks | None = None
        self._is_restored = True  # the callbacks are, where they were saved
        self._has_ended = False  # ended early, and was saved or stopped before `train` returned

    def __call__(
        self, train: Callable[..., Any], resume_from_checkpoint: str | bool | None, *arguments: Any, **more: Any
    ) -> Any:
        """Train, starting at the step where the run was interrupted."""
        if resume_from_checkpoint and self._resumes_at is None and self._run.attempt == 0:
            raise TrainError(
                "train(resume_from_checkpoint=...) cannot be combined with ResumeExactly(), which resumes from the "
                "run's own checkpoints: remove it; to start from trained weights, load them with from_pretrained()"
            )
        trainer = self._trainer
        make_loader, take = trainer.get_train_dataloader, trainer.get_batch_samples

        def take_loader() -> Any:
            self._batches = map_batches(_expect_shard(make_loader()), self._run.world.world_size)
            return self._batches.ordinary()

        def take_checked(batches: Iterator[Any], *arguments: Any, **options: Any) -> Any:
            assert self._batches is not None
            return take(map(self._batches.checked, batches), *arguments, **options)

        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(trainer, get_train_dataloader=take_loader, get_batch_samples=take_checked))
            folder = None
            if self._resumes_at is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                _say_where_to_go_on(folder, trainer.args, self._resumes_at)
                # The weights are restored with the rest, once the optimizer exists.
                stack.enter_context(_replaced(trainer, _load_from_checkpoint=lambda *_, **__: None))
                stack.enter_context(_replaced(trainer.args, ignore_data_skip=False, eval_on_start=False))
            try:
                return train(folder, *arguments, **more)
            finally:
                if self._batches is not None:
                    self._batches.close()

    # Called by the callback, in this order.

    def begin(self, state: TrainerState, control: TrainerControl) -> None:
        """Call once model, optimizer and scheduler exist."""
        trainer, batches = self._trainer, self._batches
        assert batches is not None
        accumulate = trainer.args.gradient_accumulation_steps
        steps = FrameworkSteps(
            epochs=state.num_train_epochs,
            steps=-(-batches.length // accumulate),
            batch=batches.batch,
            accumulate=accumulate,
            world=self._run.world.world_size,
            samples=batches.samples,
            limit=state.max_steps,
        )
        things = {
            "model": trainer.model_wrapped,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
        }
        self._loop = loop = self._run.take_over(things, steps)
        if self._run.step != (self._resumes_at or 0):
            raise TrainError(
                f"the newest checkpoint, of step {self._resumes_at}, is damaged and has been set aside: resume the run "
                "once more, and it continues from the one before"
            )
        loop.data.expect(batches.arrange(loop.seed), held_rows(batches.data))
        self._run.watch(loop, batches.ordinary(), batches, _REMEDY)
        loop.before_save = self._note
        self._steps = steps.steps
        self._epoch = self._run.step // steps.steps
        state.compute_steps(trainer.args, state.max_steps)
        if self._resumes_at is not None:
            # Before the callbacks are restored: trainer_state.json has to list them, in whatever state they are then.
            fresh = TrainerState(stateful_callbacks=[*_stateful(trainer), control])
            state.stateful_callbacks = fresh.stateful_callbacks
            _put_back(self._kept, trainer)
            self._has_ended = control.should_training_stop = self._kept.has_ended
        self._derived = DerivedTrainer(trainer, copy.deepcopy(self._kept.derived))
        self._own_callbacks = OwnCallbacks(trainer, copy.deepcopy(self._kept.own_callbacks))
        self._is_restored = self._resumes_at is None
        self.rest()

    def begin_epoch(self) -> None:
        """Call before the first batch of an epoch is requested."""
        self.settle()
        assert self._batches is not None
        if self._has_ended or self._run.step == self._epoch * self._steps:
            self._restore_callbacks()
        self._batches.enter(self._epoch, self._batches.length if self._has_ended else 0)
        self._epoch += 1

    def end_epoch(self, control: TrainerControl) -> None:
        """Call after the batches of an epoch."""
        self.rest()
        if self._has_ended:  # what follows them was already done
            control.should_log = control.should_evaluate = control.should_save = False

    def begin_step(self) -> None:
        """Call before the computation on the first batch of a step."""
        self.settle()
        self._restore_callbacks()
        self._micro_batch = 0
        self._going().begin(0)
        self._is_settled = False

    def begin_micro_batch(self) -> None:
        """Call before the other batches of a step."""
        self._micro_batch += 1
        self._going().begin(self._micro_batch)

    def end_step(self, *, evaluates: bool) -> None:
        """Call after the update. Code that follows belongs to the step, so saves and stops wait for the next step."""
        if evaluates:
            self.rest()

    def rest(self) -> None:
        """Call before code outside of steps: seeds it, so that it draws the same after a resume."""
        self._going().rest(self._run.step)

    def settle(self) -> None:
        """Call when everything belonging to a step is done; saves if a save is due, or leaves."""
        if not self._is_settled:
            self._is_settled = True
            assert self._derived is not None
            self._tell(self._derived.end_step())
            self._going().end()

    def _restore_callbacks(self) -> None:
        """Call at the same place as the save: the callbacks' own code has run again until there."""
        if not self._is_restored:
            self._is_restored = True
            assert self._own_callbacks is not None
            self._own_callbacks.restore()

    def _tell(self, changed: set[str]) -> None:
        if changed:
            self._going().warn(
                f"steps change {', '.join(sorted(changed))} of the {type(self._trainer).__name__}, which no checkpoint "
                "contains: it starts over after a resume, which is exact only if no step depends on it, for example if "
                "it is only logged. Numbers, tensors, and lists and dicts of these are kept: use those instead"
            )

    def log(self, logs: Mapping[str, Any]) -> None:
        """Write the numbers among these to the run's metrics."""
        values = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
        if self._loop is not None and values:
            self._run.log(self._trainer.state.global_step, values)

    def _going(self) -> Loop:
        assert self._loop is not None
        return self._loop

    def _note(self) -> None:
        """Bring the kept values up to date before a save."""
        trainer = self._trainer
        self._kept.trainer = {
            **{name: getattr(trainer.state, name) for name in _STATE},
            **{name: getattr(trainer, name) for name in _TRAINER if hasattr(trainer, name)},
        }
        self._kept.derived = {} if self._derived is None else self._derived.state()
        self._kept.own_callbacks = {} if self._own_callbacks is None else self._own_callbacks.state()
        self._kept.callbacks = [callback.state()["attributes"] for callback in _stateful(trainer)]
        is_short = trainer.state.global_step < trainer.state.max_steps
        self._kept.has_ended = trainer.control.should_training_stop and is_short


def _put_back(kept: Kept, trainer: Any) -> None:
    for name, value in copy.deepcopy(kept.trainer).items():  # copied, because the trainer appends to the log
        if isinstance(value, torch.Tensor):
            getattr(trainer, name).copy_(value)
        else:
            setattr(trainer.state if name in _STATE else trainer, name, value)
    for callback, attributes in zip(_stateful(trainer), copy.deepcopy(kept.callbacks), strict=False):
        for name, value in attributes.items():
            setattr(callback, name, value)


def _stateful(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


def _newest_step(run: ScriptRun) -> int | None:
    """The step that the run will resume from, unless reading that checkpoint shows that it is damaged."""
    steps = steps_that_count(run.directory.checkpoints, read_lineage(run.directory)) if run.world.is_main else []
    return broadcast_object(max(steps, default=None))


def _say_where_to_go_on(folder: str, args: TrainingArguments, step: int) -> None:
    """Write the one file of a trainer's checkpoint from which `train` gets its starting step."""
    known = {field.name for field in dataclasses.fields(TrainerState)}
    from_args = {name: getattr(args, name) for name in known & set(vars(args)) if name.endswith("_steps")}
    state = TrainerState(**{**from_args, "global_step": step, "train_batch_size": args.train_batch_size})
    state.save_to_json(os.path.join(folder, "trainer_state.json"))  # noqa: PTH118


@contextlib.contextmanager
def _replaced(thing: Any, **attributes: Any) -> Iterator[None]:
    """Set these attributes on an object for the duration of the block."""
    before = {name: vars(thing)[name] for name in attributes if name in vars(thing)}
    vars(thing).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                vars(thing)[name] = before[name]
            else:
                del vars(thing)[name]


def _trainer_above(frame: FrameType | None, callback: ResumeExactly) -> Any:
    """The trainer that is being constructed with this callback."""
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer) and callback in trainer.callback_handler.callbacks:
            return trainer
        frame = frame.f_back
    raise TrainError("on_init_end() of ResumeExactly is for Trainer.__init__ to call")


def _refuse_unsupported(trainer: Any) -> None:
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    is_twice = sum(isinstance(callback, ResumeExactly) for callback in trainer.callback_handler.callbacks) > 1
    for what, there, remedy in (
        ("an IterableDataset", is_stream, "make it map-style, or write the loop with run.resumable()"),
        ("two ResumeExactly()", is_twice, "give it one"),
        ("DeepSpeed", trainer.is_deepspeed_enabled, "use DDP"),
        ("FSDP", trainer.is_fsdp_enabled, "use DDP"),
        ("DataParallel", trainer.args.n_gpu > 1, "start one process for each GPU, as cluster-ddp and torchrun do"),
        ("auto_find_batch_size", trainer.args.auto_find_batch_size, "give the batch size that fits"),
    ):
        if there:
            raise TrainError(f"ResumeExactly cannot resume a Trainer with {what} exactly: {remedy}")


def _expect_shard(loader: Any) -> Any:
    """Return the loader; refuse one with which rank 0 fetches for all ranks."""
    if hasattr(loader, "split_batches"):
        raise TrainError(
            "ResumeExactly takes loaders in which each rank fetches its own batches: set dispatch_batches=False in "
            "accelerator_config="
        )
    return loader
