"""Everything around a training loop, be it the trainer's or a custom loop.

A rank joins the others, resumes, reports its phase, agrees with the others when to stop and save, ends, and records
failures.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from cluster_ddp.errors import Cause
from cluster_ddp.job import JobSpec
from cluster_ddp.launch.variables import STOP_AFTER_VARIABLE
from cluster_ddp.run import events
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.stopfile import PERSON, SAVE_AND_END
from cluster_ddp.train.checks.differences import refuse_differences
from cluster_ddp.train.data.order import Order
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.ranks.distributed import (
    all_gather_object,
    broadcast_object,
    cleanup_distributed,
    find_world,
    hold_group,
)
from cluster_ddp.train.ranks.failure import record_failure
from cluster_ddp.train.ranks.meeting import meet_in
from cluster_ddp.train.ranks.process import RankProcess, become_rank, join_ranks
from cluster_ddp.train.ranks.stop import AT_ONCE, StopConsensus, StopDecision
from cluster_ddp.train.repeated import RepeatedSteps
from cluster_ddp.train.saving import Saving
from cluster_ddp.train.state.selfcheck import check_taken_back, lost_between_ranks, no_longer_there
from cluster_ddp.train.state.training import State

_COMPARED_AFTER = 2  # steps: the second step is the first that starts from an updated state
_QUICK = 0.5  # seconds of a step that may be computed after a stop
_RETRY_AFTER = (1.0, 3.0, 0.0)  # seconds to wait after each try to save the last step


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes
    ----------
    completed
        Whether all steps are done; if not, training was stopped and can be resumed.
    step
        The number of finished (and saved) steps.
    reason
        Why it was stopped, one of `run.stopfile.REASONS`, or None.
    at_once
        Whether the stop asked to exit without waiting.
    metrics
        The last value of each metric.
    """

    completed: bool
    step: int
    reason: str | None = None
    at_once: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def joined_rank(
    directory: RunDirectory, attempt: int, read_job: Callable[[], JobSpec], *, writer: EventWriter | None
) -> Iterator[tuple[JobSpec, RankProcess]]:
    """Make this process a rank of a run, join the other ranks, and leave the group at the end.

    Parameters
    ----------
    read_job
        Returns the job. Its errors are recorded like all others.
    writer
        Writes the events; None if cluster-ddp did not start this run, in which case no stack traces are written either.

    Yields
    ------
    The job, and the `RankProcess` of this process.

    Raises
    ------
    SystemExit
        Something failed, here or on another rank; it has been printed and recorded.
    """
    world = find_world()
    process: RankProcess | None = None
    is_joined = dist.is_initialized()  # by the program itself, which then also destroys it
    try:
        process = become_rank(world, directory.attempt(attempt) if writer else None)
        job = read_job()
        process.stop.install(job.requeue.signal)
        join_ranks(job)
        yield job, process
    except BaseException as error:
        record_failure(error, writer, attempt=attempt, world=world, process=process)
        raise SystemExit(1) from error
    if is_joined:
        hold_group()
    else:
        cleanup_distributed()


class Session:
    """One rank's side of one attempt of a run, from the resume to the end.

    Parameters
    ----------
    directory
        Where checkpoints are written; with None, nothing is saved.
    writer
        Writes rank 0's events; with None, nothing is recorded.

    Raises
    ------
    TrainError
        The ranks do not share the directory.
    """

    def __init__(
        self,
        job: JobSpec,
        directory: RunDirectory | None,
        attempt: int,
        process: RankProcess,
        writer: EventWriter | None,
    ) -> None:
        self.world = find_world()
        differs = meet_in(directory.path, self.world) if directory is not None else None
        self.beat = process.beat
        self.decision = StopDecision()  # of all ranks, after the last step or during the evaluation that follows it
        self.saving = Saving(job, directory, writer, attempt, self.world)
        self.repeated = RepeatedSteps(job, directory, attempt, self.world, self.warn)
        self.compared: Sequence[Optimizer] = ()  # whose weights are compared where a resume repeats steps
        self._process, self._attempt, self._writer = process, attempt, writer
        self._consensus = self._new_consensus()
        self._state: State | None = None
        self._order: Order | None = None
        self._total_steps = 0
        self.is_resumed = False  # whether a checkpoint has been restored
        self._compared_after: int | None = None
        self._step_begun, self._step_seconds = 0.0, math.inf
        self._stop_after = float(os.environ.get(STOP_AFTER_VARIABLE, math.inf))
        if differs is not None:
            self.warn(differs)

    @property
    def step(self) -> int:
        return self.beat.steps

    def record(self, event: str, **fields: Any) -> None:
        """Record an event (rank 0 only)."""
        if self.world.is_main and self._writer is not None:
            self._writer.write(event, attempt=self._attempt, step=self.step, **fields)

    def warn(self, message: str) -> None:
        """Print a warning on rank 0, and record it for `status`."""
        self.saving.warn(message)

    # Start.

    def resume(
        self, state: State, order: Order, *, total_steps: int, make_fresh: Callable[[], State] | None = None
    ) -> Mapping[str, float]:
        """Load the newest intact checkpoint into the state, if there is one, and set `step`.

        Parameters
        ----------
        make_fresh
            Builds the state again, as at the start of an attempt, to check that it is restored completely.

        Returns
        -------
        The metrics that were saved with the checkpoint.
        """
        self.saving.make_fresh = make_fresh
        self._state, self._order, self._total_steps = state, order, total_steps
        restored = self.saving.restore(state)
        self.repeated.begin()
        if restored is not None:
            self.repeated.resume(restored.step, restored.manifest.attempt)
            self.is_resumed = True
            self.beat.steps = restored.step
            if restored.manifest.world_size == self.world.world_size:  # otherwise the same bits are not promised
                self._compare_threads(state.counts.threads)
                self._compare_versions(restored.manifest.versions.get("torch"))
                if state.is_of_task:
                    check_taken_back(state, restored.scalars, restored.extra)
                    if lost := no_longer_there(state, restored.scalars):
                        self.warn(lost)
            elif state.is_of_task and (lost := lost_between_ranks(state, restored.scalars, restored.extra)):
                self.warn(lost)
        state.counts.threads = torch.get_num_threads()
        if self.world.world_size > 1:
            self._compared_after = self.step + _COMPARED_AFTER
        state.watch()
        return {} if restored is None else restored.manifest.metrics

    def _compare_versions(self, before: str | None) -> None:
        if before not in (None, str(torch.__version__)):
            self.warn(
                f"torch is version {torch.__version__}, but was {before} when the checkpoint was saved: the results "
                "may differ from those of a run that was never stopped"
            )

    def _compare_threads(self, before: int | None) -> None:
        """Warn if torch uses another number of threads than at the save: it then adds in a different order."""
        now = torch.get_num_threads()
        if self.world.device.type == "cpu" and before not in (None, now):
            self.warn(
                f"torch uses {now} threads, but used {before} when the checkpoint was saved: the last bits of the "
                "weights may differ from those of a run that was never stopped. For the same bits, keep "
                "slurm.cpus_per_task as it was, or set OMP_NUM_THREADS"
            )

    def record_start(self, **fields: Any) -> None:
        """Record that training starts or resumes.

        Raises
        ------
        TrainError
            Another process has become the same rank.
        """
        self.beat.expect_alone()
        self.record(
            events.RESUMED if self.is_resumed else events.STARTED,
            world_size=self.world.world_size,
            total_steps=self._total_steps,
            **fields,
        )

    # Steps.

    def begin_step(self) -> None:
        """Call before computing a step; the ranks exchange their votes while it runs."""
        assert self._state is not None
        self._step_begun = time.monotonic()
        self._consensus.begin(self.step)
        self.saving.begin_step(self._state)

    def end_step(self) -> StopDecision:
        """Call after a step's update; the returned `decision` is the same on all ranks."""
        assert self._state is not None
        step = self.step + 1
        self.beat.step(step)
        self._step_seconds = time.monotonic() - self._step_begun
        self._state.check_groups()
        self.saving.after_step(self._state, step)
        if self.compared:
            self.repeated.note_weights(step, self.compared)
        if step == self._compared_after:
            refuse_differences(f"after step {step} weights or optimizer", self._state.alike())
        self.decision = self._consensus.end(step - 1)
        if step >= self._stop_after:
            self.decision = StopDecision(SAVE_AND_END, PERSON, synced=True)
        if step == self._total_steps:  # before the end, when programs remove hooks and the like
            self.saving.unsaved.look(self._state)
        elif self.decision.synced:  # about once a second
            self.saving.unsaved.look_now_and_then(self._state)
            self.repeated.pass_on()
        return self.decision

    def continue_check(self) -> Callable[[int], bool]:
        """Return a function that says, after each batch of an evaluation, whether to go on; the same on all ranks."""
        consensus = self._new_consensus()

        def ask(batch: int) -> bool:
            self.beat.step(self.step)
            consensus.begin(batch)
            self.decision = consensus.end(batch)
            return not self.decision.stops

        return ask

    @property
    def replaced_signals(self) -> list[str]:
        """The signals that this rank no longer receives: see `StopSignals.replaced_signals`."""
        return self._process.stop.replaced_signals

    def stop_of_any_rank(self) -> StopDecision:
        """Return the most urgent stop that any rank has been asked for; all ranks must call it."""
        stop = self._process.stop
        level, reason = max(all_gather_object((stop.level, stop.reason or "")))
        return StopDecision(level, reason or None)

    @property
    def save_is_due(self) -> bool:
        """Whether ``checkpoint:`` asks for a checkpoint of this step."""
        return self.decision.save or self.saving.is_due(self.step)

    def save(self, metrics: dict[str, float], *, again: bool = False) -> None:
        """Start saving the state; with `again`, even if this step has already been saved."""
        assert self._state is not None and self._order is not None
        before = self.beat.phase
        self.beat.enter(Phase.SAVING)
        self.repeated.save(self.step)
        # The last step has been looked at: since then, programs remove hooks and the like.
        if self.step < self._total_steps and not self.saving.has_saved(self.step):
            self.saving.unsaved.look_before_save(self._state)
        self.saving.save(
            self._state,
            step=self.step,
            samples=self._order.consumed(self.step),
            epoch=self._order.epoch(self.step),
            metrics=metrics,
            is_last=self.step >= self._total_steps or self.decision.stops,
            again=again,
        )
        self.beat.enter(before)

    # The end.

    def end(self, save: Callable[[], None], *, completed: bool) -> None:
        """Save the last step, wait until it is durable, and record how training ended.

        Raises
        ------
        TrainError
            All steps are done, but the checkpoint could not be written. After a stop this is not an error: the run
            continues from the previous checkpoint.
        """
        assert self._state is not None
        self.beat.enter(Phase.STOPPING)
        if self.decision.stops:
            self.record(events.STOP_REQUESTED, reason=self.decision.reason)
        durable = self._save_for_good(save)
        if self.step < self._total_steps:
            self.saving.unsaved.look(self._state)
        if completed and not durable:
            why = f" ({self.saving.why_failed})" if self.saving.why_failed else ""
            raise TrainError(
                f"all {self.step} steps are done, but their checkpoint could not be written{why}; remove the cause, "
                "for example by freeing some space on the run's storage, and resume",
                cause=Cause.OUTSIDE,
            )
        self.record(events.COMPLETED if completed else events.STOPPED, reason=self.decision.reason)

    def has_time(self) -> bool:
        """Whether, after a stop, the loss of one more step is wanted and does not take long; all ranks must call it."""
        is_quick = self.decision.level < AT_ONCE and self._step_seconds < _QUICK
        return broadcast_object(is_quick and self.repeated.is_due(self.step + 1))

    def close(self) -> None:
        """Free the memory; call on all ranks before the group is destroyed."""
        self.repeated.close()
        self.saving.close()
        self.beat.enter(Phase.DONE)

    def _save_for_good(self, save: Callable[[], None]) -> bool:
        """Save the last step, retrying after a pause; return whether it is durable."""
        self.saving.finish()  # otherwise, with when_busy: skip, a save in progress would cause this one to be skipped
        for pause in _RETRY_AFTER:
            save()
            if self.saving.finish():
                return True
            # torchrun's agent on the first node hosts the store, and may have been killed. The first try does not do
            # without it, as a collective waits only for so long, and a save may take longer.
            self.saving.do_without_store()
            time.sleep(pause)
        return False

    def _new_consensus(self) -> StopConsensus:
        return StopConsensus(
            self._process.stop,
            self.saving.is_wanted,
            rank=self.world.rank,
            world_size=self.world.world_size,
            interval=self._process.consensus_seconds,
        )
