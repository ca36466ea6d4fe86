"""A rank's side of a run for a training loop of one's own: what the trainer does around its loop, without the loop.

    with join_run(folder="by-hand") as run:
        ...                                  # model, optimizer, data
        run.resume(model, optimizer, stream, total_steps=1000, first_loss=...)
        for micro in rank_micro_batches(stream, plan, run.world.rank, run.step, 1000):
            run.begin_step()
            ...                              # forward, backward, optimizer.step()
            if run.end_step():
                break

docs/own-script.md has a whole script, and says what each part is.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cluster_ddp.job import JobSpec, load_resolved
from cluster_ddp.launch.heartbeat import Phase
from cluster_ddp.launch.variables import ATTEMPT_VARIABLE, RUN_VARIABLE
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.record import read_record
from cluster_ddp.train.data.order import SampleStream
from cluster_ddp.train.distributed import World, barrier, find_world
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.metrics.file import MetricsFile
from cluster_ddp.train.metrics.log import Report
from cluster_ddp.train.metrics.loggers import open_loggers
from cluster_ddp.train.model import settle_buckets
from cluster_ddp.train.nonfinite import FiniteWeights
from cluster_ddp.train.rank import RankProcess
from cluster_ddp.train.session import Session, joined_rank
from cluster_ddp.train.state import State, Stateful
from cluster_ddp.train.twins import twins

_RATES = "learning rates of the optimizer"


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
    place = os.environ.get(RUN_VARIABLE)
    directory = RunDirectory(Path(place or folder).absolute())
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    writer = EventWriter(directory, f"rank-{find_world().rank}") if place else None

    left: SystemExit | None = None

    def read_job() -> JobSpec:
        if place:
            return load_resolved(directory.job_file)
        return JobSpec(name="script", script=Path(sys.argv[0]).name or "python")

    with joined_rank(directory, attempt, read_job, writer=writer) as (job, process):
        run = ScriptRun(job, directory, attempt, process, writer)
        try:
            yield run
        except SystemExit as end:
            if end.code not in (None, 0):
                run.fail()
                raise
            left = end  # sys.exit(0) in the middle of the script ends it as reaching its last line does
        except BaseException:
            run.fail()
            raise
        run.end()
    if left is not None:
        raise left


class ScriptRun:
    """What a script does with its run; `join_run` makes it.

    Attributes
    ----------
    world
        Rank, local rank, world size and device of this process.
    job
        The job file's settings; under a bare torchrun the defaults.
    """

    def __init__(
        self, job: JobSpec, directory: RunDirectory, attempt: int, process: RankProcess, writer: EventWriter | None
    ) -> None:
        self.world, self.job = find_world(), job
        if self.world.is_main:
            directory.path.mkdir(parents=True, exist_ok=True)
        barrier()
        self._session = Session(job, directory, attempt, process, writer)
        self._directory, self._attempt, self._is_run = directory, attempt, writer is not None
        self._report = Report()
        self._check_weights: Callable[[int], None] = lambda step: None
        self._stream: SampleStream | None = None
        self._total_steps = 0
        self._session.beat.enter(Phase.READY)

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return self._session.step

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
        """Fill model and optimizer from the newest intact checkpoint, if there is one, and set `step`.

        The learning rates of the optimizer's groups are kept with the rest. A scheduler of torch is resumed by `also`.

        Parameters
        ----------
        model
            As it is trained: wrapped in DDP when there are several ranks, in training mode.
        stream
            Tells how many samples and epochs a step stands for.
        total_steps
            Where training ends.
        first_loss
            Computes the loss of the first micro-batch of the whole training (``rank_micro_batches(..., 0, 1)``), with
            the generators seeded. DDP settles its gradient buckets on it: without that, a resume on three ranks or more
            adds in another order and ends with other bits.
        also
            What else is to be saved, such as a scheduler or a gradient scaler: its ``state_dict()`` holds tensors, or
            what JSON can hold.
        """
        if self.world.world_size > 1:
            settle_buckets(model, also, first_loss)
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        self._stream, self._total_steps = stream, total_steps
        self._check_weights = FiniteWeights(bare).check
        state = State(bare, optimizer, also=_Own(optimizer, also))
        self._session.resume(
            state, stream, total_steps=total_steps, fresh=_Once(state, model, optimizer, also, self.world)
        )
        if self.world.is_main:
            self._report = self._open_report()
        optimizer.register_step_pre_hook(lambda *_: self._session.saving.wait_for_staging())
        self._session.tell_start()

    def begin_step(self) -> None:
        """Call before the computation of a step."""
        self._session.beat.enter(Phase.TRAINING)
        self._session.begin_step()

    def end_step(self) -> bool:
        """Call when a step's update is made; saves when that is due.

        Returns
        -------
        Whether all ranks agreed to stop, the same on every rank: leave the loop then.
        """
        self._resumed()
        stops = self._session.end_step().level > 0
        if not stops and self._session.save_is_due:
            self._save()
        return stops

    def evaluating(self) -> None:
        """Say that an evaluation comes, which the hang watchdog does not take for a step; `begin_step` ends it."""
        self._session.beat.enter(Phase.EVALUATING)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line to metrics.jsonl; all ranks call it, with values that are the same on all."""
        stream = self._resumed()
        self._report.log(step=step, samples=stream.consumed(step), epoch=stream.epoch(step - 1), values=values)

    def end(self) -> None:
        """Save the last step, see it durable, and record how the run ended. `join_run` calls it."""
        self._resumed()
        stopped = self._session.decision.level > 0 and self.step < self._total_steps
        self._session.end(self._save, completed=not stopped)
        self._report.close(failed=False)
        self._session.close()

    def fail(self) -> None:
        """Close what keeps metrics, after an exception. `join_run` calls it."""
        self._report.close(failed=True)

    def _open_report(self) -> Report:
        file = MetricsFile(self._directory.metrics_file, self._attempt)
        if not self._is_run:
            return Report(file)
        wandb_id = read_record(self._directory).wandb_id
        return Report(file, None, open_loggers(self.job, self._directory, wandb_id, self.step))

    def _save(self) -> None:
        self._check_weights(self.step)
        self._session.save(dict(self._report.latest))

    def _resumed(self) -> SampleStream:
        if self._stream is None:
            raise TrainError("the script has not called resume(model, optimizer, stream, ...) of its run")
        return self._stream


class _Once:
    """Makes the state of a script once more, to see that it comes back: a script has nothing that makes its model anew.

    It is a copy of model and optimizer as they are now, before anything is restored, on the CPU and on rank 0, which is
    used once and let go of; later ones are copies of what they are then.

    Raises
    ------
    TaskError
        They cannot be copied.
    """

    def __init__(
        self, state: State, model: nn.Module, optimizer: Optimizer, also: Stateful | None, world: World
    ) -> None:
        self._state, self._model, self._optimizer, self._also = state, model, optimizer, also
        self._copies = twins(model, optimizer) if world.is_main else None

    def __call__(self) -> State:
        model, optimizer = self._copies or twins(self._model, self._optimizer)
        self._copies = None
        own = _Own(optimizer, copy.copy(self._also))
        self._state.put_back_first(own)
        return State(model, optimizer, also=own)


class _Own:
    """A script's own state, with the learning rates, which a script may change in whatever way."""

    def __init__(self, optimizer: Optimizer, also: Stateful | None) -> None:
        self._optimizer, self._also = optimizer, also

    def state_dict(self) -> dict[str, Any]:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return {**({} if self._also is None else self._also.state_dict()), _RATES: rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rates = state.pop(_RATES, ())
        for group, rate in zip(self._optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._also is not None and state:
            self._also.load_state_dict(state)
