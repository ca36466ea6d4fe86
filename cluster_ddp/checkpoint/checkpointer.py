"""`Checkpointer`: saves the training state in the background, and restores and verifies it."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from cluster_ddp.checkpoint.coordinator import SaveCoordinator
from cluster_ddp.checkpoint.errors import AttemptSuperseded, CheckpointError, RanksDiverged
from cluster_ddp.checkpoint.plan import SavePlan, Tensors, as_json, describe, make_plan
from cluster_ddp.checkpoint.replicas import ReplicaDigest
from cluster_ddp.checkpoint.restore import Check, Restore, Restored
from cluster_ddp.checkpoint.staging import Staging
from cluster_ddp.checkpoint.writer import Report, Save, Writer
from cluster_ddp.errors import Cause
from cluster_ddp.printing import say
from cluster_ddp.run import events
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.lineage import Origin, record_origin
from cluster_ddp.run.storage import Storage
from cluster_ddp.run.unfinished import failed_save, why_it_failed

if TYPE_CHECKING:
    from cluster_ddp.job import CheckpointSpec

_EXIT_WAIT = 5.0  # seconds that an exiting process waits for a save that needs other ranks
_MAX_UNREPORTED = 100


class Checkpointer:
    """The checkpoints of one run.

    Every rank creates one, and all call `restore`, `save` and `finish` in the same order. The loop is blocked while
    this rank's share of the state is copied into host memory; the rest happens in a thread that uses no collectives.
    `save` does not raise storage errors: they are reported, earlier checkpoints stay, and the next save tries again.

    Parameters
    ----------
    directory
        ``<run>/checkpoints``, on storage that all ranks see.
    run_id, job_digest
        Recorded in each checkpoint; a checkpoint of another run is never loaded, renamed or removed.
    attempt
        The number of this attempt of the run, recorded as well. The checkpoint it resumes from is recorded in the
        attempt's folder, if there is one; once a newer attempt has begun, this one changes nothing any more.
    settings
        The job's ``checkpoint:`` section.
    store
        The process group's store, or None for a single
        process.
    report
        Called with an event's name and fields on rank 0, also from the background thread. If it returns False, the
        event was not recorded and is passed again with the next one; a failed save is then also reported on a rank of
        another node.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        job_digest: str,
        settings: CheckpointSpec,
        attempt: int = 0,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        store: Store | None = None,
        report: Report = lambda event, fields: None,
        storage: Storage | None = None,
    ) -> None:
        self.last_saved: int | None = None  # the step of the last checkpoint known to be durable: restored, or saved
        self._directory, self._run_id, self._settings, self._rank = directory, run_id, settings, rank
        self._attempt = RunDirectory(directory.parent).attempt(attempt)
        self._storage = storage or Storage()
        self._record = report
        self._unreported = collections.deque[tuple[str, dict[str, Any]]](maxlen=_MAX_UNREPORTED)
        self._reporting = threading.Lock()  # the loop and the background thread take turns
        if rank == 0:
            with contextlib.suppress(OSError):  # it exists already, or the first save will report why not
                self._storage.mkdir(directory)
                self._storage.fsync_dir(directory.parent)
        self._coordinator = SaveCoordinator(
            store, rank=rank, world_size=world_size, local_rank=local_rank, writing=settings.ranks_writing
        )
        self._writer = Writer(
            directory,
            run_id=run_id,
            attempt=self._attempt,
            job_digest=job_digest,
            settings=settings,
            coordinator=self._coordinator,
            report=self._report,
            storage=self._storage,
        )
        self._staging = Staging()
        self._digest: ReplicaDigest | None = None
        self._plan: SavePlan | None = None
        self._described: object = None
        self._seen: object = None
        self._on_cuda = False
        self._is_spoilt = False  # whether a copy on the GPU has been spoilt by what went on alongside
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._durable = True
        _live.add(self)

    def save(
        self,
        *,
        step: int,
        samples: int,
        epoch: int,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
        metrics: Mapping[str, float],
        is_last: bool = False,
    ) -> bool:
        """Start a save; returns once the state is copied (on the CPU) or its copy is under way (on CUDA).

        On CUDA, a save fails whose tensors change before `wait_for_staging`; those after it no longer overlap.

        If the previous save is under way, waits for it or, with ``when_busy: skip``, reports ``checkpoint-skipped``
        and returns; rank 0 decides for all. After `finish` a save is never skipped.

        Parameters
        ----------
        tensors
            By name: ``model.<fqn>``, ``optimizer.<fqn>.<state>``, ``ema.<fqn>``; any shape and strides, on any device.
            The same names on all ranks. Tensors that share memory are stored once. A tensor that is neither an
            `nn.Parameter` nor has optimizer state (a buffer) is stored as rank 0 has it.
        scalars
            Anything JSON can represent.
        metrics
            The latest values, for ``keep_best``; non-finite ones are omitted.
        is_last
            Whether no step follows; only for what is said if the save fails.

        Returns
        -------
        False, on all ranks, if the save was skipped.

        Raises
        ------
        CheckpointError
            A checkpoint cannot contain a tensor or scalar of this kind.
        RanksDiverged
            The previous save found tensors that differ between ranks but must not, and published nothing.
        AttemptSuperseded
            The previous save found that a newer attempt had begun, and published nothing.
        """
        number = self._saves
        self._saves += 1
        busy = self._thread is not None and self._thread.is_alive()
        if self._settings.when_busy == "skip" and self._coordinator.from_rank_0(busy):
            if self._rank == 0:
                reason = "the one before is still being written"
                self._report(events.CHECKPOINT_SKIPPED, {"step": step, "reason": reason})
            return False
        self._join()
        self._raise_earlier_findings()
        save = Save(
            number=number,
            step=step,
            samples=samples,
            epoch=epoch,
            scalars=as_json(scalars),
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            plan=self.plan_for(tensors),
            began=time.time(),
            is_last=is_last,
        )
        # First, because a GPU sends one thing after another to the host, and the next step would wait for the copy.
        names = save.plan.replicated_names if self._coordinator.world_size > 1 or self._on_cuda else ()
        digest = ReplicaDigest({name: tensors[name] for name in names})
        writes = self._rank in save.plan.layouts
        if writes:
            self._staging.prepare(save.plan.layouts[self._rank], self._on_cuda)
            self._staging.copy(tensors, frozenset() if self._is_spoilt else save.plan.replicated)
        self._digest, self._durable = digest, False
        if self._settings.background:
            self._start(self._run, save, writes, digest)
        else:
            self._run(save, writes, digest)
        return True

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the staging memory for these tensors in the background; otherwise the first save waits for it.

        Call it after the first step, once the optimizer has its state.
        """
        self._join()
        layout = self.plan_for(tensors).layouts.get(self._rank)
        if layout is not None:
            self._start(self._staging.prepare, layout, self._on_cuda)

    def wait_for_staging(self) -> None:
        """Call right before parameters, optimizer or EMA change: they may still be being copied or compared."""
        self._staging.wait_for_staging()
        if self._digest is not None:
            self._digest.wait()
            self._digest = None

    def finish(self) -> bool:
        """Wait for the save under way; returns whether it is durable, True if there is none. Raises as `save` does."""
        self._join()
        self._raise_earlier_findings()
        return self._durable

    def use_collectives(self, gather: Callable[[Any], list[Any]]) -> None:
        """Have the saves from now on need no store; see `SaveCoordinator`. Call `finish` right after each."""
        self._coordinator.use_collectives(gather)

    def close(self) -> None:
        """Finish the save under way and free the memory. Call it on all ranks before destroying the process group."""
        self._join()
        self._staging.release()

    def restore(self, tensors: Mapping[str, Tensor], check: Check = lambda scalars, stored: None) -> Restored | None:
        """Fill the live tensors from the newest intact checkpoint that counts, the same one on all ranks.

        A damaged checkpoint is set aside by rank 0 (renamed, never deleted) and reported with the names of its damaged
        files; the previous one is tried next. A checkpoint saved by another run is reported, skipped and left in
        place. All bytes are read and verified in one pass. The choice is recorded before this returns: from then on,
        anything earlier attempts do beyond it does not count.

        Parameters
        ----------
        tensors
            The live tensors, by the names under which they were saved. Stored tensors whose names begin with
            ``optimizer.``, ``buffer.``, ``extra.`` or ``task.`` and are not among them are returned in
            `Restored.extra`.
        check
            Called with the scalars and the stored tensors of a checkpoint; raises `ValueError` if they are not what
            `save` was given, and the checkpoint then counts as damaged.

        Returns
        -------
        Restored
            None if the run has never had a checkpoint.

        Raises
        ------
        CheckpointError
            There are checkpoints but none is intact, or the choice cannot be recorded. Nothing was deleted.
        CheckpointMismatch
            The checkpoint is intact but belongs to a different model or optimizer; no live tensor was touched.
        """
        self._join()
        restore = Restore(
            self._directory,
            self._run_id,
            coordinator=self._coordinator,
            storage=self._storage,
            report=self._report,
        )
        restored = restore.into(tensors, check)
        self._record_origin(restored)
        if restored is not None:
            self.last_saved = restored.step
        return restored

    def _record_origin(self, restored: Restored | None) -> None:
        problem = None
        if self._rank == 0 and self._attempt.path.is_dir():
            manifest = None if restored is None else restored.manifest
            origin = Origin(None) if manifest is None else Origin(manifest.step, manifest.digest)
            try:
                record_origin(self._attempt, origin, self._storage)
            except OSError as error:
                file = self._attempt.origin_file
                problem = f"cannot record in {file} which checkpoint it continues from: {error.strerror}"
        problem = self._coordinator.from_rank_0(problem)
        if problem is not None:
            raise CheckpointError(f"attempt {self._attempt.number} {problem}", cause=Cause.OUTSIDE)

    def plan_for(self, tensors: Mapping[str, Tensor]) -> SavePlan:
        """The plan of who writes which tensors; the previous one as long as the tensors are the same."""
        named = tensors if isinstance(tensors, Tensors) else Tensors(tensors)
        seen = list(named), named.looks()
        if self._plan is None or seen[1] is None or seen != self._seen:
            described = describe(tensors)
            if self._plan is None or described != self._described:
                self._plan, self._described = make_plan(*described, self._coordinator.writers), described
            self._seen = seen
            self._on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        return self._plan

    def _raise_earlier_findings(self) -> None:
        """Raise what the previous save found, on all ranks."""
        if self._writer.superseded:
            raise AttemptSuperseded(self._attempt.number)
        if self._writer.diverged is not None:
            raise RanksDiverged(
                f"the ranks no longer train the same model: {self._writer.diverged}\n"
                "    no checkpoint was made of it, and the previous one is intact: loss() has to compute everything "
                "that needs gradients by model(...), and nothing that changes weights may depend on the rank"
            )

    def _run(self, save: Save, writes: bool, digest: ReplicaDigest) -> None:
        """Carry out a save on the background thread; no exception may escape."""
        try:
            digest.compute()
            shard_bytes = functools.partial(self._shard, digest) if writes else None
            if self._writer.carry_out(save, shard_bytes, digest.by_kind()):
                self.last_saved, self._durable = save.step, True
        except Exception as error:
            say(f"cluster-ddp: the save of step {save.step} was given up: {error or type(error).__name__}")

    def _shard(self, digest: ReplicaDigest) -> memoryview:
        """The bytes of this rank's shard, once it is sure that they are those at the call of `save`."""
        if others := digest.other_copies(self._staging.copies()):
            self._is_spoilt = True
            raise CheckpointError(
                f"{others[0]} was changed before the update, for example by loss(), while it was being copied; from "
                "now on, saves copy everything before training continues"
            )
        return self._staging.shard()

    def _start(self, task: Callable[..., None], *arguments: object) -> None:
        # A new thread starts on GPU 0, and would allocate memory there for each rank of the node.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def work() -> None:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            task(*arguments)

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None

    @property
    def why_failed(self) -> str | None:
        """Why the last finished save is not durable, in words, on all ranks; None if it is."""
        return None if self._writer.failed is None else why_it_failed(self._writer.failed)

    def _report(self, event: str, fields: dict[str, Any]) -> bool:
        """Report an event; one that cannot be recorded (say, on a full disk) is retried with the next one."""
        if event == events.CHECKPOINT_FAILED:
            say(f"cluster-ddp: {failed_save(fields)}; {self._what_now(is_last=bool(fields['last']))}")
        elif event == events.CHECKPOINT_DAMAGED:
            say(f"cluster-ddp: the checkpoint of step {fields['step']} is skipped: {'; '.join(fields['problems'])}")
        with self._reporting:
            self._unreported.append((event, fields))
            try:
                while self._unreported and self._record(*self._unreported[0]) is not False:
                    self._unreported.popleft()
            except Exception as error:
                self._unreported.popleft()
                say(f"cluster-ddp: cannot report {event}: {error!r}")
            return not self._unreported

    def _what_now(self, *, is_last: bool) -> str:
        """Say what follows a failed save."""
        there = "there is no checkpoint yet" if self.last_saved is None else "earlier checkpoints are kept"
        if not is_last:
            return f"training continues; {there}"
        return (
            "no step follows: if trying again fails as well, remove the cause, for example by freeing some space on "
            f"the run's storage, and resume; {there}"
        )

    def _end(self) -> None:
        """At interpreter exit: finish a save that needs no other rank; soon give up one that does."""
        if self._thread is None:
            return
        self._join(None if self._coordinator.world_size == 1 else _EXIT_WAIT)
        self._coordinator.give_up()
        self._join(_EXIT_WAIT)


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for checkpointer in list(_live):
        checkpointer._end()
