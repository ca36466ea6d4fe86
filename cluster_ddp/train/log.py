"""What is logged of the steps, and when."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import read_record
from cluster_ddp.spec import JobSpec
from cluster_ddp.train.delayed import HostCopy
from cluster_ddp.train.distributed import World
from cluster_ddp.train.feed import Feed
from cluster_ddp.train.lines import LineFile
from cluster_ddp.train.loggers import open_loggers
from cluster_ddp.train.metrics import MetricsFile, Speed, StepLoss, TotalLosses, communication_seconds
from cluster_ddp.train.progress import open_display
from cluster_ddp.train.report import Report
from cluster_ddp.train.sampler import Share
from cluster_ddp.train.update import Update


class _Row(NamedTuple):
    """A log step whose loss is not yet added up over the ranks."""

    step: int
    epoch: int
    measured: float
    loss: StepLoss
    values: dict[str, float]
    norm: HostCopy | None


class Log:
    """Measures every ``log.every_steps``-th step and the last one, and passes the numbers to rank 0's report.

    They are passed on about once a second, together: a file, a terminal and an exchange between ranks for each logged
    step would be most of what a small model's training costs beyond a bare loop.

    Attributes
    ----------
    step_loss
        Takes the losses of the step under way; None when it is not one that is logged.
    latest
        The last value of each metric.
    """

    def __init__(
        self,
        job: JobSpec,
        run: RunDirectory | None,
        attempt: int,
        world: World,
        feed: Feed,
        device: torch.device,
        wrapped: nn.Module,
    ) -> None:
        self.step_loss: StepLoss | None = None
        self._job, self._run, self._attempt, self._world = job, run, attempt, world
        self._feed, self._device, self._wrapped = feed, device, wrapped
        self._every, self._last = job.log.every_steps, feed.total_steps
        self._report = Report()
        self._speed = Speed()
        self._rows: list[_Row] = []
        self._exchanging: tuple[list[_Row], TotalLosses] | None = None
        self._ids: list[int] | None = None
        self._id_file: LineFile | None = None

    @property
    def latest(self) -> Mapping[str, float]:
        """The last value of each metric."""
        return self._report.latest

    def open(self, step: int) -> None:
        """Open the files, the display and the loggers, going on from this step."""
        if self._run is not None and self._job.log.sample_ids:
            path = self._run.attempt(self._attempt).samples_file(self._world.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._id_file, self._ids = LineFile(path), []
        if self._world.is_main and self._run is not None:
            self._report = Report(
                MetricsFile(self._run.metrics_file, self._attempt),
                open_display(self._job.name, self._feed.total_steps, step),
                open_loggers(self._job, self._run, read_record(self._run).wandb_id, step),
            )
        self._speed.start(step, self._feed.consumed(step), self._feed.waited)

    def begin(self, step: int) -> None:
        """Call before a step; its number counts from 0."""
        finished = step + 1
        if finished % self._every == 0 or finished == self._last:
            self.step_loss = StepLoss(self._device)
        else:
            self.step_loss = None

    def take(self, share: Share) -> None:
        """Note the samples of a micro-batch, when they are recorded."""
        if self._ids is not None:
            self._ids += share.indices[: share.samples].tolist()

    def end(self, step: int, epoch: int, update: Update, lr: float) -> None:
        """Call when `step` steps are finished."""
        if self._ids is not None and self._id_file is not None:
            self._id_file.write(json.dumps({"step": step, "ids": self._ids}))
            self._ids = []
        if self.step_loss is not None:
            norm = HostCopy(update.norm.reshape(1)) if update.norm is not None else None
            self._rows.append(_Row(step, epoch, time.time(), self.step_loss, self._measured(step, update, lr), norm))

    def exchange(self) -> None:
        """Pass on what was exchanged the last time, and begin to add up the losses since, without waiting for them.

        All ranks call it after the same step.
        """
        self._pass_on()
        if self._rows:
            self._exchanging = self._rows, TotalLosses([row.loss for row in self._rows])
            self._rows = []

    def flush(self) -> None:
        """Pass on all; waits for the other ranks, which call it after the same step."""
        self.exchange()
        self._pass_on()

    def evaluated(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Log what an evaluation gave."""
        self.flush()
        self._report.log(step=step, samples=self._feed.consumed(step), epoch=epoch, values=values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._report.say(f"step {step}  epoch {epoch}  {shown}")
        self._speed.start(step, self._feed.consumed(step), self._feed.waited)

    def say(self, text: str) -> None:
        """Show a line on rank 0."""
        self._report.say(text)

    def close(self, *, failed: bool, wait: bool = True) -> None:
        """Close everything; with `wait` false without waiting for a network."""
        if failed:
            with contextlib.suppress(Exception):  # of what made the training fail, the device perhaps
                self._pass_on_what_is_here()
        if self._id_file is not None:
            self._id_file.close()
            self._id_file = None
        self._report.close(failed=failed, wait=wait)

    def _pass_on(self) -> None:
        if self._exchanging is None:
            return
        rows, losses = self._exchanging
        self._exchanging = None
        for row, loss in zip(rows, losses.read(), strict=True):
            values = self._keep(row, {"train/loss": loss, **row.values})
        self._report.show(row.step, row.epoch, values)

    def _keep(self, row: _Row, values: dict[str, float]) -> dict[str, float]:
        if row.norm is not None:
            values = {**values, "grad_norm": row.norm.read()[0]}
        samples = self._feed.consumed(row.step)
        self._report.log(step=row.step, samples=samples, epoch=row.epoch, values=values, measured=row.measured)
        return values

    def _pass_on_what_is_here(self) -> None:
        """Pass on what needs no other rank: they may be gone. The last rows are then without their losses."""
        if self._world.world_size == 1:
            self.flush()
        if self._exchanging is not None and self._exchanging[1].arrived:
            self._pass_on()
        without = [*(self._exchanging[0] if self._exchanging is not None else ()), *self._rows]
        self._rows, self._exchanging = [], None
        for row in without:
            self._keep(row, row.values)

    def _measured(self, step: int, update: Update, lr: float) -> dict[str, float]:
        values = {"lr": lr, **self._speed.read(step, self._feed.consumed(step), self._feed.waited)}
        if isinstance(self._wrapped, DistributedDataParallel):
            values["communication_wait"] = min(1.0, communication_seconds(self._wrapped) / values["seconds_per_step"])
        if update.scaler is not None:
            values["scale"] = update.scaler.get_scale()
        if update.scaler is not None or update.skipped:
            values["skipped_updates"] = float(update.skipped)
        return values
