"""Decides when a checkpoint is due, and connects the training state to the checkpointer that writes and reads it."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist

from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.plan import SavePlan
from cluster_ddp.checkpoint.restore import Restored
from cluster_ddp.checkpoint.verify import run_id_of
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.printing import say
from cluster_ddp.run.directory import RunDirectory, step_name
from cluster_ddp.run.events import CHECKPOINT, WARNING, EventWriter
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.unfinished import SAVES_APART, seconds_between_saves
from cluster_ddp.train.checks.differences import refuse_different_state
from cluster_ddp.train.checks.unsaved import UnsavedChanges
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.ranks.communicating import IN_CHECKS, Alone
from cluster_ddp.train.ranks.distributed import World, all_gather_object, broadcast_object, store_of_ranks
from cluster_ddp.train.state.selfcheck import check_comes_back
from cluster_ddp.train.state.stored import check_scalars
from cluster_ddp.train.state.training import Collected, State

_CHECKED_AFTER = 2  # steps of an attempt: by then the optimizer has created its state and used it


class Saving:
    """The checkpoints of this training; without a run directory there are none."""

    def __init__(
        self, job: JobSpec, run: RunDirectory | None, events: EventWriter | None, attempt: int, world: World
    ) -> None:
        self._settings: CheckpointSpec = job.checkpoint
        self._since = time.monotonic()
        minutes = job.checkpoint.every_minutes
        self._seconds = None if minutes is None else 60.0 * minutes
        self._at_most = self._seconds or math.inf  # time between saves as the job has set it
        self._saved: int | None = None
        self._gone: int | None = None  # rank 0: the last saved step, if its checkpoint no longer exists
        self._checkpointer: Checkpointer | None = None
        self._steps_here = 0
        self._rank = world.rank
        self._logged: set[str] = set()  # metrics logged by a custom loop, which may log anything
        self._is_best_due = False
        self._checked: SavePlan | None = None
        self._events, self._attempt = events, attempt
        self.make_fresh: Callable[[], State] | None = None  # builds the state again, to check that it is restored
        self.unsaved = UnsavedChanges(world.rank, self.warn, is_saved=run is not None)
        if run is None:
            return
        if world.rank == 0 and attempt:
            history = read_history(run)
            self._save_more_often(history)
            last = history.last_saved
            if last is not None and not os.path.lexists(run.checkpoints / step_name(last)):
                self._gone = last

        self._checkpointer = Checkpointer(
            run.checkpoints,
            run_id=run_id_of(run),
            attempt=attempt,
            job_digest=hashlib.sha256(job.model_dump_json().encode()).hexdigest(),
            settings=job.checkpoint,
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            store=store_of_ranks(),
            report=self._report,
        )

    def restore(self, state: State) -> Restored | None:
        """Load the newest intact checkpoint into the state; return None if there is none."""
        if self._checkpointer is None:
            return None
        restored = self._checkpointer.restore(state.live(), check_scalars)
        if restored is not None:
            state.load(restored.step, restored.scalars, restored.extra)
            self._saved = restored.step
        if self._gone is not None and (restored is None or restored.step < self._gone):
            begins = "starts again at step 0" if restored is None else f"continues from step {restored.step}"
            self.warn(
                f"the checkpoint of step {self._gone}, the last that this run saved, is gone from its folder "
                f"checkpoints/: training {begins}"
            )
        return restored

    def _save_more_often(self, history: History) -> None:
        """If an earlier attempt's last save was cut short, save often enough to keep most of the next attempt."""
        seconds = seconds_between_saves(history)
        if seconds is not None and (self._seconds is None or seconds < self._seconds):
            self._seconds = seconds
            print(
                "cluster-ddp: the last save of an attempt before this one was cut short: saving every "
                f"{seconds:.0f} s until checkpoint: is set accordingly"
            )

    def has_saved(self, step: int) -> bool:
        """Whether the last checkpoint that was restored or started is of this step."""
        return self._saved == step

    def is_due(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for a checkpoint after this many steps."""
        every = self._settings.every_steps
        return every is not None and step > 0 and step % every == 0

    def is_wanted(self) -> bool:
        """Whether ``every_minutes`` or a logged ``keep_best`` metric asks for one now; only rank 0's answer counts."""
        return self._is_best_due or (self._seconds is not None and time.monotonic() - self._since >= self._seconds)

    def is_wanted_by_all(self) -> bool:
        """Whether the ``checkpoint.keep_best`` metric has been logged since the last save; all ranks must call it."""
        return self._settings.keep_best is not None and broadcast_object(self._is_best_due)

    def note_logged(self, values: Mapping[str, float]) -> None:
        """Note the metrics that a script logged; that of ``checkpoint.keep_best`` requests a checkpoint."""
        self._logged.update(values)
        best = self._settings.keep_best
        self._is_best_due |= best is not None and best.metric in values

    def warn_not_logged(self) -> None:
        """Warn, at the end, if a script has not logged the metric of ``checkpoint.keep_best``."""
        best = self._settings.keep_best
        if self._rank == 0 and best is not None and self._logged and best.metric not in self._logged:
            self.warn(
                f"checkpoint.keep_best.metric: {best.metric} was not logged in this attempt, and no checkpoint of it "
                f"was kept as the best; run.log() was given {', '.join(sorted(self._logged))}"
            )

    def check_metric(self, evaluated: Collection[str]) -> None:
        """Raise a `TaskError` unless the metric of ``checkpoint.keep_best`` is among those of an evaluation."""
        best = self._settings.keep_best
        if best is not None and best.metric not in (*evaluated, "train/loss"):
            known = ", ".join(evaluated) or "nothing"
            raise TaskError(
                f"checkpoint.keep_best.metric: there is no {best.metric}; evaluate() of the task gives {known}"
            )

    def save(
        self,
        state: State,
        *,
        step: int,
        samples: int,
        epoch: int,
        metrics: dict[str, float],
        is_last: bool,
        again: bool = False,
    ) -> None:
        """Start saving the state after `step` steps, unless that was already done and `again` is false.

        A step is saved again when it has been evaluated since, because the metrics decide whether its checkpoint is
        kept. `is_last` says that no step follows.
        """
        self._since = time.monotonic()
        self._is_best_due = False
        if self._checkpointer is None or (self.has_saved(step) and not again):
            return
        tensors, scalars = collected = state.collect()
        refuse_different_state(f"after step {step}", *collected, state.from_rank_0())
        self._check(state, step, collected)
        is_begun = self._checkpointer.save(
            step=step,
            samples=samples,
            epoch=epoch,
            tensors=tensors,
            scalars=scalars,
            metrics=metrics,
            is_last=is_last,
        )
        if is_begun:
            self._saved = step

    def wait_for_staging(self) -> None:
        """Call before the parameters change."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()

    def begin_step(self, state: State) -> None:
        """Call in each step before its loss is computed."""
        if self._steps_here == _CHECKED_AFTER - 1:
            self.unsaved.made_from.begin()
            if self._rank == 0:
                state.watch_gradients()

    def after_step(self, state: State, step: int) -> None:
        """Call after each step, with the number of finished steps.

        After the first step it allocates the memory for background saving, so that no save has to wait for it; after
        the second it checks that the state is restored completely. It looks at attributes after both.
        """
        if self._steps_here >= _CHECKED_AFTER or self._checkpointer is None:
            return
        self._steps_here += 1
        if self._steps_here == 1:
            self._checkpointer.prepare(state.collect()[0])
            state.watch_again(is_compared=self._rank == 0 or state.communicates)
        if self._steps_here == _CHECKED_AFTER:
            collected = state.collect()
            refuse_different_state(f"after step {step}", *collected, state.from_rank_0())
            if self._rank == 0:
                state.note()
            self.unsaved.made_from.end()
            self._checked = None  # a save after the first step has checked it before that
            self._check(state, step, collected)
            self.unsaved.begin(state)

    def warn(self, message: str) -> None:
        """Print a warning on rank 0, and record it for `status`."""
        if self._rank == 0:
            say(f"cluster-ddp: {message}")
            self._report(WARNING, {"rank": self._rank, "message": message})

    def _report(self, event: str, fields: dict[str, Any]) -> bool:
        if event == CHECKPOINT and self._seconds is not None:  # earlier attempts may not have measured a whole save
            self._seconds = max(self._seconds, min(SAVES_APART * fields["seconds"], self._at_most))
        return self._events is None or self._events.write(event, attempt=self._attempt, **fields)

    def _check(self, state: State, step: int, collected: Collected) -> None:
        """Check on rank 0 that the state is restored, once per plan of tensors; raise a `TaskError` if it is not."""
        if self.make_fresh is None or self._checkpointer is None:
            return
        plan = self._checkpointer.plan_for(collected[0])
        if plan is self._checked:
            return
        self._checked = plan
        check = functools.partial(check_comes_back, state, step, collected, plan, self.make_fresh)
        if not state.communicates:
            problem, has_communicated = broadcast_object(_alone(check, collected) if self._rank == 0 else (None, False))
            if has_communicated:
                state.note_communicating()
            if problem is not None and not state.communicates:
                raise TaskError(problem)
        if state.communicates and self._rank == 0:
            check()  # an error ends this rank at once: the others may be waiting for it in a collective
        elif state.communicates:
            state.call_along(collected, self.make_fresh)

    def finish(self) -> bool:
        """Wait until the save in progress is durable; return False, on all ranks, if it failed."""
        durable = broadcast_object(self._checkpointer is None or self._checkpointer.finish())
        if not durable:
            self._saved = None  # the same step may be saved again
        return durable

    def do_without_store(self) -> None:
        """Have the ranks coordinate saves by collectives from now on; call it on all, once the loop is over."""
        if self._checkpointer is not None and dist.is_initialized():
            self._checkpointer.use_collectives(all_gather_object)

    @property
    def why_failed(self) -> str | None:
        """Why the last save is not durable, on all ranks; None if it is."""
        return None if self._checkpointer is None else self._checkpointer.why_failed

    def close(self) -> None:
        """Free the memory; call on all ranks before the group is destroyed."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _alone(check: Callable[[], None], collected: Collected) -> tuple[str | None, bool]:
    """What is wrong according to a check that only this rank makes, and whether it has to be made by all together."""
    of_task = {name: tensor for name, tensor in collected[0].items() if name.startswith("task.")}
    kept = {name: tensor.clone() for name, tensor in of_task.items()} if dist.is_initialized() else {}
    problem = None
    with Alone(IN_CHECKS) as alone:
        try:
            check()
        except ClusterDDPError as error:
            problem = str(error)
    if alone.has_tried:  # load_state_dict() may have put its first values into the live tensors before it communicated
        for name, tensor in kept.items():
            of_task[name].copy_(tensor)
    return problem, alone.has_tried
