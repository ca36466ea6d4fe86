"""A rank's side of a run for a training loop of one's own: what the trainer does around its loop, without the loop.

    with join_run(folder="by-hand") as run:
        ...                                  # model, optimizer, data
        run.resume(model, optimizer, stream, total_steps=1000, first_loss=...)
        for share in rank_shares(stream, plan, run.world.rank, run.step, 1000):
            run.begin_step()
            ...                              # forward, backward, optimizer.step()
            if run.end_step():
                break

docs/own-script.md has a whole script, and says what each part is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cluster_ddp.run import events
from cluster_ddp.run.board import Phase
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.spec import JobSpec, load_resolved
from cluster_ddp.train.distributed import barrier, cleanup_distributed, find_world
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.failure import record_failure
from cluster_ddp.train.metrics import MetricsFile
from cluster_ddp.train.rank import RankProcess, become_rank, join_ranks
from cluster_ddp.train.report import Report
from cluster_ddp.train.sampler import SampleStream
from cluster_ddp.train.saving import Saving
from cluster_ddp.train.state import State, Stateful
from cluster_ddp.train.stop import Agreed, Agreement
from cluster_ddp.train.task import Task
from cluster_ddp.train.update import Update
from cluster_ddp.train.warmup import settle_buckets


@contextlib.contextmanager
def join_run(folder: Path | str) -> Iterator[ScriptRun]:
    """Make this process a rank of the run that it was started for, and join the other ranks.

    Left without an exception, it saves the last step and records that the run is completed, or stopped when `end_step`
    said so. An exception is printed and recorded as a failure, and the process ends with status 1.

    Parameters
    ----------
    folder
        Where checkpoints and metrics go when a bare torchrun started the script. Started by cluster-ddp they go to the
        run directory.

    Raises
    ------
    SystemExit
        Something failed, here or on another rank; it has been reported.
    """
    place = os.environ.get("CLUSTER_DDP_RUN")
    directory = RunDirectory(Path(place or folder).absolute())
    attempt = int(os.environ.get("CLUSTER_DDP_ATTEMPT", "0"))
    world = find_world()
    writer = EventWriter(directory, f"rank-{world.rank}") if place else None
    process: RankProcess | None = None
    run: ScriptRun | None = None
    try:
        job = load_resolved(directory.job_file) if place else _bare_job()
        process = become_rank(world, directory.attempt(attempt) if place else None, job.requeue.signal)
        join_ranks(job)
        run = ScriptRun(job, directory, attempt, process, writer)
        yield run
        run.end()
    except BaseException as error:
        step = run.step if run is not None else None
        record_failure(error, writer, attempt=attempt, world=world, process=process, step=step)
        raise SystemExit(1) from error
    cleanup_distributed()


def _bare_job() -> JobSpec:
    return JobSpec(name="script", script=Path(sys.argv[0]).name or "python")


class ScriptRun:
    """What a script does with its run; `join_run` makes it.

    Attributes
    ----------
    world
        Rank, local rank, world size and device of this process.
    job
        The job file's settings; under a bare torchrun the defaults.
    step
        Steps that are finished.
    stop, agreement, saving
        The parts: this rank's wish to stop, what all ranks agree on, the checkpoints.
    """

    def __init__(
        self, job: JobSpec, directory: RunDirectory, attempt: int, process: RankProcess, writer: EventWriter | None
    ) -> None:
        self.world, self.job, self.step = find_world(), job, 0
        self._attempt, self._writer, self._beat = attempt, writer, process.beat
        if self.world.is_main:
            directory.path.mkdir(parents=True, exist_ok=True)
        barrier()
        self.stop = process.stop
        self.saving = Saving(job, directory, writer, attempt, self.world)
        self.agreement = Agreement(
            self.stop, self.saving.is_wanted, rank=self.world.rank, world_size=self.world.world_size
        )
        self._report = Report(MetricsFile(directory.metrics_file, attempt) if self.world.is_main else None)
        self._stream: SampleStream | None = None
        self._state: State | None = None
        self._total_steps = 0
        self._agreed = Agreed()
        self._beat.enter(Phase.READY)

    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        stream: SampleStream,
        *,
        total_steps: int,
        first_loss: Callable[[], Tensor],
        also: Stateful | None = None,
    ) -> None:
        """Fill model and optimizer from the newest sound checkpoint, if there is one, and set `step`.

        The learning rate is not state: set it from the step, in every step.

        Parameters
        ----------
        model
            As it is trained: wrapped in DDP when there are several ranks, in training mode.
        stream
            Tells how many samples and epochs a step stands for.
        total_steps
            Where training ends.
        first_loss
            Computes the loss of the first micro-batch of the whole training (``rank_shares(..., 0, 1)``), with the
            generators seeded. DDP settles its gradient buckets on it: without that, a resume on three ranks or more
            adds in another order and ends with other bits.
        also
            What else is to be saved, such as a gradient scaler: its ``state_dict()`` holds tensors, or what JSON can
            hold.
        """
        also = also or Task()
        if self.world.world_size > 1:
            settle_buckets(model, also, first_loss)
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        self._stream, self._total_steps = stream, total_steps
        parameters = [parameter for parameter in bare.parameters() if parameter.requires_grad]
        self._state = State(bare, Update(optimizer, parameters, clip_norm=None, scaler=None), None, also)
        restored = self.saving.restore(self._state)
        if restored is not None:
            self.step = restored.step
        optimizer.register_step_pre_hook(lambda *_: self.saving.wait_copied())
        started = events.STARTED if restored is None else events.RESUMED
        self.tell(started, world_size=self.world.world_size, total_steps=total_steps)

    def begin_step(self) -> None:
        """Call before the computation of a step."""
        self._beat.enter(Phase.TRAINING)
        self.agreement.begin(self.step)

    def end_step(self) -> bool:
        """Call when a step's update is made; saves when that is due.

        Returns
        -------
        Whether all ranks agreed to stop, the same on every rank: leave the loop then.
        """
        self.step += 1
        self._beat.step(self.step)
        self._agreed = self.agreement.end(self.step - 1)
        stops = self._agreed.level > 0
        if not stops and (self._agreed.save or self.saving.is_due(self.step)):
            self._save()
        return stops

    def evaluating(self) -> None:
        """Say that an evaluation comes, which the hang watchdog does not take for a step; `begin_step` ends it."""
        self._beat.enter(Phase.EVALUATING)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line to metrics.jsonl; all ranks call it, with values that are the same on all."""
        stream, _ = self._resumed()
        self._report.log(step=step, samples=stream.consumed(step), epoch=stream.epoch(step - 1), values=values)

    def tell(self, event: str, **fields: Any) -> None:
        """Record an event of the run, on rank 0; under a bare torchrun nowhere."""
        if self.world.is_main and self._writer is not None:
            self._writer.write(event, attempt=self._attempt, step=self.step, **fields)

    def end(self) -> None:
        """Save the last step, see it durable, and record how the run ended. `join_run` calls it."""
        self._resumed()
        self._beat.enter(Phase.STOPPING)
        stopped = self._agreed.level > 0 and self.step < self._total_steps
        if stopped:
            self.tell(events.STOP_REQUESTED, reason=self._agreed.reason)
        self._save()
        if not self.saving.finish() and not stopped:
            raise TrainError(f"all is done, but the checkpoint of step {self.step} could not be written: make room")
        self.tell(events.STOPPED if stopped else events.COMPLETED, reason=self._agreed.reason)
        self._report.close(failed=False)
        self.saving.close()
        self._beat.enter(Phase.DONE)

    def _save(self) -> None:
        stream, state = self._resumed()
        phase = self._beat.phase
        self._beat.enter(Phase.SAVING)
        self.saving.save(
            state,
            step=self.step,
            samples=stream.consumed(self.step),
            epoch=stream.epoch(self.step),
            metrics=dict(self._report.latest),
        )
        self._beat.enter(phase)

    def _resumed(self) -> tuple[SampleStream, State]:
        if self._stream is None or self._state is None:
            raise TrainError("the script has not called resume(model, optimizer, stream, ...) of its run")
        return self._stream, self._state
