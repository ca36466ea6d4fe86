"""When a checkpoint is due, and the trainer's side of writing and reading it."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.plan import SavePlan
from cluster_ddp.checkpoint.restore import Restored
from cluster_ddp.checkpoint.verify import run_id_of
from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.job.errors import ClusterDDPError
from cluster_ddp.printing import say
from cluster_ddp.run.directory import RunDirectory, step_name
from cluster_ddp.run.events import WARNING, EventWriter
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.unfinished import seconds_between_saves
from cluster_ddp.train.distributed import World, broadcast_object
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.refusals import refuse_own_state
from cluster_ddp.train.state.selfcheck import check_comes_back
from cluster_ddp.train.state.stored import check_scalars
from cluster_ddp.train.state.training import Collected, State

_SHOWN = 5  # names of what is told
_LOOKING = 0.001  # part of the time that may go into looking for what begins to change and is not saved
_CHECKED_AFTER = 2  # steps of an attempt: the optimizer has its state, and has used it


class Saving:
    """The checkpoints of this training; without a run directory there are none."""

    def __init__(
        self, job: JobSpec, run: RunDirectory | None, events: EventWriter | None, attempt: int, world: World
    ) -> None:
        self._settings: CheckpointSpec = job.checkpoint
        self._since = time.monotonic()
        minutes = job.checkpoint.every_minutes
        self._seconds = None if minutes is None else 60.0 * minutes
        self._saved: int | None = None
        self._gone: int | None = None  # the last step that was saved, where nothing of its name is there; on rank 0
        self._checkpointer: Checkpointer | None = None
        self._steps_here = 0
        self._rank = world.rank
        self._warned: set[str] = set()
        self._next_look = math.inf  # `time.monotonic` of it, once there is something to compare with
        self._logged: set[str] = set()  # by a script, which may log what it likes
        self._is_best_due = False
        self._checked: SavePlan | None = None
        self._events, self._attempt = events, attempt
        self.fresh: Callable[[], State] | None = None  # makes the state once more, to check that it comes back
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
            store=_store(),
            report=self._report,
        )

    def restore(self, state: State) -> Restored | None:
        """Put the newest intact checkpoint's state into the training; None when there is none."""
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
        """Where the save at the end of an attempt was cut short, have something remain of the next that is."""
        seconds = seconds_between_saves(history)
        if seconds is not None and (self._seconds is None or seconds < self._seconds):
            self._seconds = seconds
            print(
                "cluster-ddp: the last save of an attempt before this one was cut short: saving every "
                f"{seconds:.0f} s until checkpoint: is set accordingly"
            )

    def has_saved(self, step: int) -> bool:
        """Whether the last checkpoint, restored or begun, is of this step."""
        return self._saved == step

    def is_due(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for one after this many steps."""
        every = self._settings.every_steps
        return every is not None and step > 0 and step % every == 0

    def is_wanted(self) -> bool:
        """Whether ``checkpoint.every_minutes``, or haste, asks for one now; rank 0 asks, the others follow."""
        return self._is_best_due or (self._seconds is not None and time.monotonic() - self._since >= self._seconds)

    def is_wanted_by_all(self) -> bool:
        """Whether the metric of ``checkpoint.keep_best`` has come since the last save; all ranks ask together."""
        return self._settings.keep_best is not None and broadcast_object(self._is_best_due)

    def note_logged(self, values: Mapping[str, float]) -> None:
        """A script has logged these: what ``checkpoint.keep_best`` goes by asks for a checkpoint."""
        self._logged.update(values)
        best = self._settings.keep_best
        self._is_best_due |= best is not None and best.metric in values

    def warn_not_logged(self) -> None:
        """Say, at the end, that a script has not logged what ``checkpoint.keep_best`` goes by."""
        best = self._settings.keep_best
        if self._rank == 0 and best is not None and self._logged and best.metric not in self._logged:
            self.warn(
                f"checkpoint.keep_best.metric: {best.metric} was not logged in this attempt, and no checkpoint of it "
                f"was kept for being the best; run.log() was given {', '.join(sorted(self._logged))}"
            )

    def check_metric(self, evaluated: Mapping[str, float]) -> None:
        """Raise a `TaskError` unless what ``checkpoint.keep_best`` goes by is among what an evaluation gave."""
        best = self._settings.keep_best
        if best is not None and best.metric not in (*evaluated, "train/loss"):
            known = ", ".join(evaluated) or "nothing"
            raise TaskError(
                f"checkpoint.keep_best.metric: there is no {best.metric}; evaluate() of the task gives {known}"
            )

    def save(
        self, state: State, *, step: int, samples: int, epoch: int, metrics: dict[str, float], again: bool = False
    ) -> None:
        """Begin to save the state after `step` steps; nothing when that has been done, unless it is to be done again.

        Again, when an evaluation has come to the state since: by its metrics the checkpoint is kept or not.
        """
        self._since = time.monotonic()
        self._is_best_due = False
        if self._checkpointer is None or (self.has_saved(step) and not again):
            return
        tensors, scalars = collected = state.collect()
        refuse_own_state(f"after step {step}", *collected, state.late_buffers())
        self._check(state, step, collected, together=False)
        is_begun = self._checkpointer.save(
            step=step,
            samples=samples,
            epoch=epoch,
            tensors=tensors,
            scalars=scalars,
            metrics=metrics,
        )
        if is_begun:
            self._saved = step

    def wait_for_staging(self) -> None:
        """Call before the parameters change."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()

    def prepare(self, state: State, step: int) -> None:
        """Call after each step, with the steps that are finished.

        After the first it finds the memory for saving in the background, so that no save has to wait for it; after the
        second it checks that the state comes back.
        """
        if self._steps_here >= _CHECKED_AFTER or self._checkpointer is None:
            return
        self._steps_here += 1
        if self._steps_here == 1:
            self._checkpointer.prepare(state.collect()[0])
        if self._steps_here == _CHECKED_AFTER:
            collected = state.collect()
            refuse_own_state(f"after step {step}", *collected, state.late_buffers())
            self._check(state, step, collected, together=True)
            self.warn_unsaved(state)

    def look(self, state: State) -> None:
        """Call now and then between steps: `warn_unsaved` as often as takes a thousandth of the training's time."""
        if time.monotonic() >= self._next_look:
            self.warn_unsaved(state)

    def warn_unsaved(self, state: State) -> None:
        """Say what has changed in model, task and optimizer and is in no checkpoint; a step may depend on it."""
        if self._rank != 0 or self._checkpointer is None:
            return
        begun = time.thread_time()
        names = state.unsaved()
        self._next_look = time.monotonic() + (time.thread_time() - begun) / _LOOKING
        if names := [name for name in names if name not in self._warned]:
            self._warned.update(names)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            self.warn(
                f"training changes {', '.join(names[:_SHOWN])}{more}, which no checkpoint contains: a resume "
                "is exact only if no step depends on it. Otherwise make it a buffer of the model, or include it in the "
                "state_dict() of the task, of the optimizer, or of something else that is passed in"
            )

    def warn(self, message: str) -> None:
        """Say on rank 0 what is to be known, and record it for `status`."""
        if self._rank == 0:
            say(f"cluster_ddp: {message}")
            self._report(WARNING, {"rank": self._rank, "message": message})

    def _report(self, event: str, fields: dict[str, Any]) -> bool:
        return self._events is None or self._events.write(event, attempt=self._attempt, **fields)

    def _check(self, state: State, step: int, collected: Collected, *, together: bool) -> None:
        """Check on rank 0 that the state comes back, unless one with these tensors has; else raise a `TaskError`."""
        if self.fresh is None or self._checkpointer is None:
            return
        plan = self._checkpointer.plan_for(collected[0])
        if plan is self._checked:
            return
        self._checked = plan
        problem = None
        if self._rank == 0:
            try:
                check_comes_back(state, step, collected, plan, self.fresh)
            except ClusterDDPError as error:
                problem = str(error)
        if together:
            problem = broadcast_object(problem)
        if problem is not None:
            raise TaskError(problem)

    def finish(self) -> bool:
        """Wait until what was begun is durable; False, on all ranks, when it could not be made so."""
        durable = broadcast_object(self._checkpointer is None or self._checkpointer.finish())
        if not durable:
            self._saved = None  # the same step may be tried again
        return durable

    @property
    def why_failed(self) -> str | None:
        """Why the last save is not durable, on all ranks; None when it is."""
        return None if self._checkpointer is None else self._checkpointer.why_failed

    def close(self) -> None:
        """Give the memory back; all ranks, before the group goes."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _store() -> dist.distributed_c10d.Store | None:
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
