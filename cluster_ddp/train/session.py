"""What happens around a training loop, the trainer's and a script's own alike.

A rank joins the others, resumes, says what it is doing, agrees with the others when to stop and to save, ends, and
records what went wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from cluster_ddp.job import JobSpec
from cluster_ddp.run import events
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.phase import Phase
from cluster_ddp.train.distributed import all_gather_object, cleanup_distributed, find_world, hold_group
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.failure import record_failure
from cluster_ddp.train.meeting import meet_in
from cluster_ddp.train.rank import RankProcess, become_rank, join_ranks
from cluster_ddp.train.refusals import refuse_differences
from cluster_ddp.train.saving import Saving
from cluster_ddp.train.state.training import State
from cluster_ddp.train.stop import StopConsensus, StopDecision

_COMPARED_AFTER = 2  # steps: the second is the first that begins with what an update has left
_RETRY_AFTER = (1.0, 3.0, 0.0)  # seconds between the tries to save the last step


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes
    ----------
    completed
        Whether all steps are done; otherwise it was stopped and can be resumed.
    step
        Steps that are finished, and saved.
    reason
        Why it was stopped, one of `run.stopfile.REASONS`, or None.
    at_once
        Whether the stop asked for no waiting.
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
    """Make this process a rank of a run, joined with the others, and leave the group at the end.

    Parameters
    ----------
    read_job
        Gives the job. Its errors are recorded like all others.
    writer
        Takes the events; None: this is no run that cluster-ddp started, and stacks are not written either.

    Yields
    ------
    The job, and what the set-up of this process left behind.

    Raises
    ------
    SystemExit
        Something failed, here or on another rank; it has been printed and recorded.
    """
    world = find_world()
    process: RankProcess | None = None
    is_joined = dist.is_initialized()  # by the program itself, which then leaves the group itself
    try:
        job = read_job()
        process = become_rank(world, directory.attempt(attempt) if writer else None, job.requeue.signal)
        join_ranks(job)
        yield job, process
    except BaseException as error:
        record_failure(error, writer, attempt=attempt, world=world, process=process)
        raise SystemExit(1) from error
    if is_joined:
        hold_group()
    else:
        cleanup_distributed()


class Order(Protocol):
    """What a number of steps stands for."""

    def epoch(self, step: int) -> int:
        """The epoch that is under way when `step` steps are finished."""

    def consumed(self, step: int) -> int:
        """The sample offset when `step` steps are finished."""


class Session:
    """One rank's side of one attempt of a run, from the resume to the end.

    Parameters
    ----------
    directory
        Where checkpoints lie; None: nothing is saved.
    writer
        Takes the events, of rank 0 only; None: nowhere.

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
        if directory is not None:
            meet_in(directory.path, self.world)
        self.beat = process.beat
        self.decision = StopDecision()  # of all ranks, after the last step or during the evaluation after it
        self.saving = Saving(job, directory, writer, attempt, self.world)
        self._process, self._attempt, self._writer = process, attempt, writer
        self._consensus = self._new_consensus()
        self._state: State | None = None
        self._order: Order | None = None
        self._total_steps = 0
        self._resumed = False
        self._compared_after: int | None = None

    @property
    def step(self) -> int:
        return self.beat.steps

    def record(self, event: str, **fields: Any) -> None:
        """Record an event, on rank 0."""
        if self.world.is_main and self._writer is not None:
            self._writer.write(event, attempt=self._attempt, step=self.step, **fields)

    # The beginning.

    def resume(
        self, state: State, order: Order, *, total_steps: int, fresh: Callable[[], State] | None = None
    ) -> Mapping[str, float]:
        """Fill the state from the newest intact checkpoint, when there is one, and set `step`.

        Parameters
        ----------
        fresh
            Makes the state once more, as at the beginning of an attempt; by it is checked that the state comes back.

        Returns
        -------
        The metrics that were saved with it.
        """
        self.saving.fresh = fresh
        self._state, self._order, self._total_steps = state, order, total_steps
        restored = self.saving.restore(state)
        if restored is not None:
            self._resumed = True
            self.beat.steps = restored.step
        if self.world.world_size > 1:
            self._compared_after = self.step + _COMPARED_AFTER
        state.watch()
        return {} if restored is None else restored.manifest.metrics

    def record_start(self, **fields: Any) -> None:
        """Record that training begins, or goes on."""
        self.record(
            events.RESUMED if self._resumed else events.STARTED,
            world_size=self.world.world_size,
            total_steps=self._total_steps,
            **fields,
        )

    # Steps.

    def begin_step(self) -> None:
        """Call before the computation of a step, in which what the ranks exchange is under way."""
        self._consensus.begin(self.step)

    def end_step(self) -> StopDecision:
        """Call when a step's update is made; `decision` is the same on all ranks."""
        assert self._state is not None
        step = self.step + 1
        self.beat.step(step)
        self._state.check_groups()
        self.saving.prepare(self._state, step)
        if step == self._compared_after:
            refuse_differences(f"after step {step} weights or optimizer", self._state.alike())
        self.decision = self._consensus.end(step - 1)
        if step == self._total_steps:  # before the end, when programs take down hooks and the like
            self.saving.warn_unsaved(self._state)
        elif self.decision.synced:  # about once a second
            self.saving.look(self._state)
        return self.decision

    def goes_on(self) -> Callable[[int], bool]:
        """What an evaluation calls after each batch, with its number: whether it goes on, the same on all ranks."""
        consensus = self._new_consensus()

        def ask(batch: int) -> bool:
            self.beat.step(self.step)
            consensus.begin(batch)
            self.decision = consensus.end(batch)
            return self.decision.level == 0

        return ask

    @property
    def unheard(self) -> list[str]:
        """The signals that this rank does not hear any more: see `StopSignals.unheard`."""
        return self._process.stop.unheard

    def asked(self) -> StopDecision:
        """Whether a stop is asked for now, on any rank; all ranks call it."""
        stop = self._process.stop
        level, reason = max(all_gather_object((stop.level, stop.reason or "")))
        return StopDecision(level, reason or None)

    @property
    def save_is_due(self) -> bool:
        """Whether ``checkpoint:`` asks for a checkpoint of this step."""
        return self.decision.save or self.saving.is_due(self.step)

    def save(self, metrics: dict[str, float], *, again: bool = False) -> None:
        """Begin to save the state; `again` also when this step has been saved."""
        assert self._state is not None and self._order is not None
        before = self.beat.phase
        self.beat.enter(Phase.SAVING)
        self.saving.save(
            self._state,
            step=self.step,
            samples=self._order.consumed(self.step),
            epoch=self._order.epoch(self.step),
            metrics=metrics,
            again=again,
        )
        self.beat.enter(before)

    # The end.

    def end(self, save: Callable[[], None], *, completed: bool) -> None:
        """Save the last step, see it durable, and record how training ended.

        Raises
        ------
        TrainError
            All is done, but the storage does not take the checkpoint. After a stop that is no error: the run goes on
            from the checkpoint before.
        """
        assert self._state is not None
        self.beat.enter(Phase.STOPPING)
        if self.decision.level:
            self.record(events.STOP_REQUESTED, reason=self.decision.reason)
        durable = self._save_for_good(save)
        if self.step < self._total_steps:
            self.saving.warn_unsaved(self._state)
        if completed and not durable:
            why = f" ({self.saving.why_failed})" if self.saving.why_failed else ""
            raise TrainError(
                f"all {self.step} steps are done, but their checkpoint could not be written{why}; free some space on "
                "the run's storage, or repair it, and resume"
            )
        self.record(events.COMPLETED if completed else events.STOPPED, reason=self.decision.reason)

    def close(self) -> None:
        """Give the memory back; all ranks, before the group goes."""
        self.saving.close()
        self.beat.enter(Phase.DONE)

    def _save_for_good(self, save: Callable[[], None]) -> bool:
        """Save the last step; False when the storage does not take it, which it may do after a moment."""
        self.saving.finish()  # while one is under way, when_busy: skip would leave this one out
        for pause in _RETRY_AFTER:
            save()
            if self.saving.finish():
                return True
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
