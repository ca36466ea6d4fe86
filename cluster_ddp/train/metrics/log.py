"""Decides what is logged about the steps and when, and sends it to metrics.jsonl, the display and the loggers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.job import JobSpec
from cluster_ddp.printing import one_line, say
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import read_record
from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.data.streams import Stream
from cluster_ddp.train.metrics.file import LineFile, MetricsFile
from cluster_ddp.train.metrics.loggers import Logger, open_loggers
from cluster_ddp.train.metrics.losses import HostCopy, StepLoss, TotalLosses
from cluster_ddp.train.metrics.progress import Display, open_display
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.update import Update


class Report:
    """Passes metrics on to the file, the display and the loggers."""

    def __init__(
        self, file: MetricsFile | None = None, display: Display | None = None, loggers: Sequence[Logger] = ()
    ) -> None:
        self.latest: dict[str, float] = {}  # the last value of each metric
        self._file = file
        self._display = display
        self._loggers = list(loggers)

    def log(
        self, *, step: int, samples: int, epoch: int, values: Mapping[str, float], measured: float | None = None
    ) -> None:
        """Log the values of a step and the time of measurement (Unix seconds; by default now)."""
        self.latest.update(values)
        if self._file is not None:
            self._file.write(step=step, samples=samples, epoch=epoch, values=values, measured=measured)
        self._loggers = [logger for logger in self._loggers if _could(logger, lambda at: at.log(step, values))]

    def show(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Show the progress of training."""
        if self._display is not None:
            self._display.update(step, epoch, values)

    def say(self, text: str) -> None:
        """Show a line."""
        if self._display is not None:
            self._display.say(text)

    def close(self, *, failed: bool, wait: bool = True) -> None:
        """Close everything; with `wait` false, loggers are not closed, because that may need a network."""
        if self._display is not None:
            self._display.close()
        if self._file is not None:
            self._file.close()
        loggers, self._loggers, self._file, self._display = self._loggers, [], None, None
        if wait:
            for logger in loggers:
                _could(logger, lambda at: at.close(failed=failed))


def _could(logger: Logger, do: Callable[[Logger], None]) -> bool:
    """Call a logger; if that fails, as on a full disk, warn and return False, as training does not depend on it."""
    try:
        do(logger)
    except Exception as error:
        said = one_line(f"{type(logger).__name__} has failed ({type(error).__name__}: {error})")
        say(f"cluster-ddp: {said}: nothing more is logged there until the next attempt; metrics.jsonl has all values")
        return False
    return True


def open_report(
    job: JobSpec, run: RunDirectory, attempt: int, step: int, *, display: Display | None = None, loggers: bool = True
) -> Report:
    """Open the report of a run, on rank 0, continuing from this step; `loggers`: with those that the job asks for."""
    file = MetricsFile(run.metrics_file, attempt)
    return Report(file, display, open_loggers(job, run, read_record(run).wandb_id, step) if loggers else ())


class _Row(NamedTuple):
    """A logged step whose loss has not been summed over the ranks yet."""

    step: int
    epoch: int
    measured: float
    loss: StepLoss
    values: dict[str, float]
    copies: dict[str, HostCopy]  # values on their way from the device


class Log:
    """Measures every ``log.every_steps``-th step and the last one, and passes the numbers to rank 0's report.

    They are passed on together, about once a second: writing to a file and a terminal and an exchange between ranks for
    each logged step would be most of a small model's overhead over a bare loop.
    """

    def __init__(
        self,
        job: JobSpec,
        run: RunDirectory | None,
        attempt: int,
        world: World,
        stream: Stream,
        device: torch.device,
        wrapped: nn.Module,
    ) -> None:
        self.step_loss: StepLoss | None = None  # collects the losses of the current step, if it is logged
        self._job, self._run, self._attempt, self._world = job, run, attempt, world
        self._stream, self._device, self._wrapped = stream, device, wrapped
        self._every, self._last = job.log.every_steps, stream.total_steps
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

    def open(self, step: int, latest: Mapping[str, float]) -> None:
        """Open the files, the display and the loggers, continuing from this step and its metrics."""
        if self._run is not None and self._job.log.sample_ids:
            path = self._run.attempt(self._attempt).samples_file(self._world.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._id_file, self._ids = LineFile(path), []
        if self._world.is_main and self._run is not None:
            display = open_display(self._job.name, self._stream.total_steps, step)
            self._report = open_report(self._job, self._run, self._attempt, step, display=display)
        self._report.latest.update(latest)
        self._speed.start(step, self._stream.consumed(step), self._stream.waited)

    def say(self, *lines: str) -> None:
        """Show lines, on rank 0."""
        for line in lines:
            self._report.say(line)

    def begin(self, step: int) -> None:
        """Call before a step, with its number counted from 0."""
        finished = step + 1
        if finished % self._every == 0 or finished == self._last:
            self.step_loss = StepLoss(self._device)
        else:
            self.step_loss = None

    def record_samples(self, micro: MicroBatch) -> None:
        """Note the samples of a micro-batch, if they are recorded."""
        if self._ids is not None:
            self._ids += micro.indices[: micro.samples].tolist()

    def end(self, step: int, epoch: int, update: Update, lr: float) -> None:
        """Call after a step, with the number of finished steps."""
        if self._ids is not None and self._id_file is not None:
            self._id_file.write(json.dumps({"step": step, "ids": self._ids}))
            self._ids = []
        if self.step_loss is not None:
            values, copies = self._measured(step, update, lr), copies_for_log(update, self._device)
            self._rows.append(_Row(step, epoch, time.time(), self.step_loss, values, copies))

    def exchange(self) -> None:
        """Pass on the losses exchanged last time, and start summing those since, without waiting for them.

        All ranks call it after the same step.
        """
        self._pass_on()
        if self._rows:
            self._exchanging = self._rows, TotalLosses([row.loss for row in self._rows])
            self._rows = []

    def flush(self) -> None:
        """Pass on everything; waits for the other ranks, which call it after the same step."""
        self.exchange()
        self._pass_on()

    def record_evaluation(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Log the results of an evaluation."""
        self.flush()
        self._report.log(step=step, samples=self._stream.consumed(step), epoch=epoch, values=values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._report.say(f"step {step}  epoch {epoch}  {shown}")
        self._speed.start(step, self._stream.consumed(step), self._stream.waited)

    def close(self, *, failed: bool, wait: bool = True) -> None:
        """Close everything; with `wait` false, without waiting for a network."""
        if failed:
            with contextlib.suppress(Exception):  # whatever made the training fail, such as the device
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
        values = {**values, **{name: copy.read()[0] for name, copy in row.copies.items()}}
        samples = self._stream.consumed(row.step)
        self._report.log(step=row.step, samples=samples, epoch=row.epoch, values=values, measured=row.measured)
        return values

    def _pass_on_what_is_here(self) -> None:
        """Pass on what needs no other rank, since they may be gone. The last rows then lack their losses."""
        if self._world.world_size == 1:
            self.flush()
        if self._exchanging is not None and self._exchanging[1].arrived:
            self._pass_on()
        without = [*(self._exchanging[0] if self._exchanging is not None else ()), *self._rows]
        self._rows, self._exchanging = [], None
        for row in without:
            self._keep(row, row.values)

    def _measured(self, step: int, update: Update, lr: float) -> dict[str, float]:
        values = {"lr": lr, **self._speed.read(step, self._stream.consumed(step), self._stream.waited)}
        if isinstance(self._wrapped, DistributedDataParallel):
            values["communication_wait"] = min(1.0, communication_seconds(self._wrapped) / values["seconds_per_step"])
        if self._device.type == "cuda":
            values["gpu_memory_peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        if update.scaler is not None or update.skipped:
            values["skipped_updates"] = float(update.skipped)
        return values


def copies_for_log(update: Update, device: torch.device) -> dict[str, HostCopy]:
    """Start copying to the host what an update leaves on the device and is logged."""
    found: dict[str, Tensor] = {}
    if update.scaler is not None:
        found["scale"] = update.scaler.scale(torch.ones(1, device=device))  # get_scale() waits for the device
    if update.norm is not None:
        found["grad_norm"] = update.norm.reshape(1)
    return {name: HostCopy(tensor) for name, tensor in found.items()}


class Speed:
    """Measures the speed between logged steps."""

    def __init__(self) -> None:
        self._time = time.perf_counter()
        self._samples = 0
        self._step = 0
        self._waited = 0.0

    def start(self, step: int, samples: int, waited: float) -> None:
        """Start a measurement at this step."""
        self._time, self._step, self._samples, self._waited = time.perf_counter(), step, samples, waited

    def read(self, step: int, samples: int, waited: float) -> dict[str, float]:
        """Means over all ranks since the last call; data_wait (0 to 1) is this rank's share of time without a batch."""
        seconds = max(time.perf_counter() - self._time, 1e-9)
        values = {
            "samples_per_second": (samples - self._samples) / seconds,
            "seconds_per_step": seconds / max(1, step - self._step),
            "data_wait": min(1.0, (waited - self._waited) / seconds),
        }
        self.start(step, samples, waited)
        return values


def communication_seconds(model: DistributedDataParallel) -> float:
    """Seconds per step in which a rank only waits for gradients: communication not overlapped with computation.

    DDP measures it every 100 steps and keeps the mean; 0 before the first measurement.
    """
    measured: dict[str, int] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    nanoseconds = measured.get("avg_backward_comm_time", 0) - measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0.0, nanoseconds / 1e9)
