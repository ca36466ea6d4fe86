"""Stops and resumes Lightning's Trainer exactly:

    trainer = Trainer(max_epochs=20, callbacks=[ResumeExactly()])
    trainer.fit(model, loader)

The state is saved and restored like that of any other loop; the checkpoints that Lightning writes are not affected.
"""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Callable, Generator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from cluster_ddp.integrations.joining import FrameworkSteps, map_batches, run_of_training
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.data.batches import MapBatches
from cluster_ddp.train.own.data.held_data import held_rows
from cluster_ddp.train.own.kept import Kept
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.run import ScriptRun

_COUNTS = ("ready", "started", "processed", "completed")
_BATCHES, _EPOCHS = "epoch_loop.batch_progress", "epoch_progress"  # in the state of Lightning's loops

_REMEDY = "Make it a part of the LightningModule, or let a callback return it from state_dict()"
_REFUSED = {
    StochasticWeightAveraging: "take WeightAveraging or EMAWeightAveraging",
    GradientAccumulationScheduler: "take accumulate_grad_batches=",
    BaseFinetuning: "give the optimizer all parameters from the beginning, and unfreeze them with requires_grad",
    ModelPruning: "prune after the training",
    LearningRateFinder: "find it by a program of its own",
    BatchSizeFinder: "find it by a program of its own",
}


class ResumeExactly(Callback):
    """Makes ``Trainer.fit`` a loop of the run, which saves and stops between batches and resumes bit for bit.

    The run is that of the surrounding `join_run` block; without one it begins and ends with ``fit``.

    Raises
    ------
    TrainError
        In ``fit``, if something cannot be resumed exactly; the message names it.
    """

    def __init__(self) -> None:
        self._around = contextlib.ExitStack()
        self._handlers: dict[int, Any] = {}
        self._run: ScriptRun | None = None
        self._fit: _Fit | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule | None = None, stage: str = "") -> None:
        """Join the run."""
        if pl_module is None:  # the first hook: called on the class, so that the trainer is in the place of self
            raise TrainError("callbacks=[ResumeExactly] lacks the parentheses: write callbacks=[ResumeExactly()]")
        if stage == "fit":
            self._run = self._around.enter_context(run_of_training())
            _refuse_callbacks(trainer)
            self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the run's state: model and optimizers exist now, and training has not begun."""
        assert self._run is not None
        self._fit = _Fit(trainer, self._run)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back the run's signal handlers, as Lightning's would communicate in the middle of a step, and metrics."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._going().put_back_metrics()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save or leave, now that the previous epoch is complete."""
        self._going().restore()
        self._going().settle()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Complete the previous batch, and begin this one."""
        self._going().begin(batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that the batch is done; a validation may follow."""
        self._going().end(batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the validation, so that it draws the same after a resume."""
        if self._fit is not None:
            self._fit.rest()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the results of the validation to the run's metrics."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.log()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save or leave after the last step; a run that began with `fit` ends here, before Lightning tears down."""
        self._going().settle()
        self._leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None = None
    ) -> None:
        """Leave the run, which was stopped or has failed."""
        if exception is None:  # called on the class, as `setup` was
            return
        if self._fit is not None:
            self._fit.close()
        self._around.__exit__(type(exception), exception, exception.__traceback__)

    def _leave(self) -> None:
        self._going().close()
        self._fit = None
        self._around.close()

    def _going(self) -> _Fit:
        assert self._fit is not None
        return self._fit


class _Fit:
    """One call of `fit`."""

    def __init__(self, trainer: Any, run: ScriptRun) -> None:
        self._trainer, self._run = trainer, run
        _refuse_unsupported(trainer)
        trainer.fit_loop.setup_data()
        self._batches = map_batches(_only_loader(trainer), run.world.world_size, int(trainer.num_training_batches))
        self._accumulate = trainer.accumulate_grad_batches
        self._kept = run.keep(loops={}, callbacks={}, datamodule={}, metrics={})
        self._loop = self._take_over()
        self._is_settled = True
        # Hooks that run before the first batch may change what was restored, and Lightning sets gradients to None.
        self._put_back = run.as_now() if run.step else None
        self._has_begun = False

    def begin(self, number: int) -> None:
        """Call before the computation on a batch, with its number within the epoch."""
        self.restore()
        self.settle()
        # Otherwise fit_loop skips the schedulers at the end of a resumed epoch. Its own setter sets True if there is
        # max_steps, and then each validation but the first would have one batch.
        _Loop.restarting.fset(self._trainer.fit_loop, False)
        if not self._has_begun and self._run.step:
            # Right after a validation Lightning counts the last step again, by which it numbers what it logs.
            self._trainer.fit_loop.epoch_loop.on_load_checkpoint(self._kept.loops["epoch_loop.state_dict"])
        self._has_begun = True
        self._loop.begin(number % self._accumulate)

    def end(self, number: int) -> None:
        """Call after it. Code that follows belongs to the step, so saves and stops wait for the next batch."""
        number += 1
        self._is_settled = number % self._accumulate != 0 and number < self._batches.length

    def settle(self) -> None:
        """Call when everything belonging to a step is done; saves if a save is due, or leaves."""
        if not self._is_settled:
            self._is_settled = True
            self._loop.end()

    def rest(self) -> None:
        """Call before code outside of steps, such as a validation: seeds it."""
        self._loop.rest(self._run.step)

    def log(self) -> None:
        """Write the current metrics to the run's."""
        values = {name: float(value) for name, value in self._trainer.callback_metrics.items()}
        if values:
            self._run.log(self._run.step + (not self._is_settled), values)

    def restore(self) -> None:
        """Call where a resume goes on: undoes what hooks have changed since the state was restored."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def put_back_metrics(self) -> None:
        """Restore the last metrics, which a scheduler may be given at the end of an epoch, long after a validation.

        Call it after the sanity check, which discards all metrics.
        """
        _metrics_of(self._trainer).update(copy.deepcopy(self._kept.metrics))

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()

    def _take_over(self) -> Loop:
        trainer, batches = self._trainer, self._batches
        steps = -(-batches.length // self._accumulate)
        optimizers = trainer.optimizers
        epochs = trainer.max_epochs if trainer.max_epochs not in (None, -1) else None
        per_step = len(optimizers) if trainer.lightning_module.automatic_optimization else 1
        limit = -(-trainer.max_steps // per_step) if trainer.max_steps not in (None, -1) else None
        if epochs is None and limit is None:
            raise TrainError(
                "ResumeExactly needs to know where training ends: give the Trainer max_epochs or max_steps"
            )
        ends = [end for end in (limit, None if epochs is None else epochs * steps) if end is not None]
        geometry = FrameworkSteps(
            epochs=-(-min(ends) // steps),
            steps=steps,
            batch=batches.batch,
            accumulate=self._accumulate,
            world=self._run.world.world_size,
            samples=batches.samples,
            limit=min(ends),
        )
        precision = trainer.precision_plugin
        things = {
            "model": trainer.strategy.model,
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
            "scheduler": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": precision if precision.state_dict() else None,
            "average": [part._average_model for part in trainer.callbacks if isinstance(part, WeightAveraging)],
        }
        loop = self._run.take_over(things, geometry)
        loop.before_save = self._note
        loop.data.expect(batches.arrange(loop.seed), held_rows(batches.data))
        self._run.watch(loop, batches.ordinary(), batches, _REMEDY)
        _warn_of_hooks(trainer, loop.warn)
        if self._run.step:
            _put_back(self._kept, trainer)
        _put_in_place(trainer, batches)
        return loop

    def _note(self) -> None:
        """Bring the kept values up to date before a save."""
        trainer = self._trainer
        self._kept.loops = _between_batches(trainer.fit_loop.state_dict(), self._batches.length)
        self._kept.callbacks = {
            callback.state_key: state for callback in trainer.callbacks if (state := callback.state_dict())
        }
        self._kept.datamodule = {} if trainer.datamodule is None else dict(trainer.datamodule.state_dict())
        self._kept.metrics = {name: copy.deepcopy(value) for name, value in _metrics_of(trainer).items()}


def _metrics_of(trainer: Any) -> dict[str, Any]:
    """The metrics for schedulers and callbacks, without those of an epoch that is not over, as no rank waits here."""
    found: dict[str, Any] = trainer._logger_connector._callback_metrics
    return found


class _Left:
    """Replaces the trainer's loader; yields the remaining batches of its current epoch."""

    def __init__(self, loader: Any, batches: MapBatches, trainer: Any) -> None:
        self._loader, self._batches, self._progress = loader, batches, trainer.fit_loop
        self._first = trainer.fit_loop.epoch_loop.batch_progress.current.completed  # applies to the first pass only

    def __iter__(self) -> Generator[Any, None, None]:
        first, self._first = self._first, 0
        return self._batches.begin(self._progress.epoch_progress.current.processed, first)

    def __len__(self) -> int:
        return self._batches.length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def _put_in_place(trainer: Any, batches: MapBatches) -> None:
    """Make the trainer's loop iterate over these batches."""
    combined, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    (loader,) = combined.flattened
    combined.reset()  # ends the iteration that `setup_data` began
    combined.flattened = [_Left(loader, batches, trainer)]
    iter(fetcher)


def _put_back(kept: Kept, trainer: Any) -> None:
    loops = kept.loops
    trainer.fit_loop.load_state_dict(loops)
    if loops[_BATCHES]["current"]["completed"] == 0:
        trainer.fit_loop.epoch_loop.restarting = False  # it begins an epoch
    trainer.fit_loop.epoch_loop.val_loop.restarting = False
    for callback in trainer.callbacks:
        if state := kept.callbacks.get(callback.state_key):
            callback.load_state_dict(copy.deepcopy(state))
    if kept.datamodule:
        trainer.datamodule.load_state_dict(copy.deepcopy(kept.datamodule))


def _between_batches(loops: dict[str, Any], length: int) -> dict[str, Any]:
    """The state of the loops between two batches, even if the next one was already counted as begun."""
    loops = copy.deepcopy(loops)
    batches, epochs = loops[_BATCHES], loops[_EPOCHS]
    for counts in (batches["total"], batches["current"]):
        counts.update(dict.fromkeys(_COUNTS, counts["completed"]))
    batches["is_last_batch"] = False  # refers to the next batch, which a resume would otherwise skip
    if batches["current"]["completed"] >= length:
        batches["current"].update(dict.fromkeys(_COUNTS, 0))
        for counts in (epochs["total"], epochs["current"]):
            counts.update(dict.fromkeys(_COUNTS, counts["completed"]))
    return loops


def _only_loader(trainer: Any) -> Any:
    """The training loader, on one rank with the sampler that Lightning uses on several, so that the order agrees.

    Raises
    ------
    TrainError
        There are several training loaders.
    """
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) != 1:
        raise TrainError(
            f"ResumeExactly takes one training DataLoader, and there are {len(loaders)}: let one data set provide all "
            "samples"
        )
    loader: Any = loaders[0]
    if type(loader) is not DataLoader or type(loader.sampler) is not RandomSampler or loader.sampler.replacement:
        return loader
    loader = copy.copy(loader)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, num_replicas=1, rank=0)
    batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    for name, part in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        object.__setattr__(loader, name, part)
    return loader


def _refuse_callbacks(trainer: Any) -> None:
    for callback in trainer.callbacks:
        name = type(callback).__name__
        for kind, remedy in _REFUSED.items():
            if isinstance(callback, kind):
                raise TrainError(f"ResumeExactly cannot resume a Trainer with the callback {name} exactly: {remedy}")


def _refuse_unsupported(trainer: Any) -> None:
    strategy = type(trainer.strategy).__name__
    is_twice = sum(isinstance(callback, ResumeExactly) for callback in trainer.callbacks) > 1
    for what, there, remedy in (
        (f"strategy {strategy}", strategy not in ("DDPStrategy", "SingleDeviceStrategy"), 'take strategy="ddp"'),
        ("reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs, "leave it out"),
        ("two ResumeExactly()", is_twice, "give it one"),
        ("fit(ckpt_path=...)", trainer.ckpt_path, "leave it out: fit() resumes from the run's own checkpoints"),
    ):
        if there:
            raise TrainError(f"ResumeExactly cannot resume a Trainer with {what} exactly: {remedy}")


def _warn_of_hooks(trainer: Any, warn: Callable[[str], None]) -> None:
    """Warn about `on_save_checkpoint` hooks, which have no effect on the run's checkpoints."""
    parts = [trainer.lightning_module, trainer.datamodule, *trainer.callbacks]
    asked = [part for part in parts if part is not None and not isinstance(part, WeightAveraging)]
    if names := sorted({type(part).__name__ for part in asked if is_overridden("on_save_checkpoint", part)}):
        warn(
            f"on_save_checkpoint() of {', '.join(names)} only affects Lightning's own checkpoints; those of the run do "
            "not contain what it adds, so a resume is exact only if no step depends on that. Store it in buffers of "
            "the LightningModule, or return it from state_dict() of the callback or datamodule"
        )
