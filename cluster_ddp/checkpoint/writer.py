"""Writes a save durably, in the background and without collectives: each rank its shard, then rank 0 the manifest.

A checkpoint becomes valid in `Writer._publish`, by the rename that gives its folder its final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

import cluster_ddp
from cluster_ddp.checkpoint.coordinator import SaveCoordinator
from cluster_ddp.checkpoint.errors import AttemptSuperseded, CheckpointOfAnotherRun
from cluster_ddp.checkpoint.folders import put_back_interrupted, temporary_name
from cluster_ddp.checkpoint.format import Manifest, Shard, shard_name
from cluster_ddp.checkpoint.plan import SavePlan
from cluster_ddp.checkpoint.retention import Retention
from cluster_ddp.process import host_name
from cluster_ddp.run import events
from cluster_ddp.run.directory import MANIFEST, AttemptDirectory, step_name
from cluster_ddp.run.storage import Storage, created
from cluster_ddp.words import listed

if TYPE_CHECKING:
    from cluster_ddp.job import CheckpointSpec

Report = Callable[[str, dict[str, Any]], object]
PIECE = 16 << 20  # bytes hashed and written at a time
_KINDS = {"model": "the weights", "optimizer": "the optimizer's state", "ema": "the average"}


@dataclass(frozen=True)
class Save:
    """One save; `number` counts the saves of this process and is the same on all ranks."""

    number: int
    step: int
    samples: int
    epoch: int
    scalars: dict[str, Any]
    metrics: dict[str, float]
    plan: SavePlan
    began: float  # Unix seconds
    is_last: bool  # whether no step follows


class SaveFailed(Exception):
    """A save cannot be completed; `details` are the fields of the event."""

    def __init__(self, details: dict[str, Any]) -> None:
        super().__init__(details.get("error"))
        self.details = details


class Writer:
    """Carries out saves, one at a time, on the thread that calls `carry_out`.

    `diverged` says which ranks did not hold the same tensors as rank 0 at the last save, if any; `superseded` says
    whether a newer attempt has begun, and is the same on all ranks after a save.

    Errors of the storage or of another rank are not raised: the save is given up, its folder removed, and rank 0
    reports ``checkpoint-failed``, or a rank of another node does if rank 0's node cannot record it. `failed` is what
    was reported about the last save, on all ranks; None if it did not fail.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        attempt: AttemptDirectory,
        job_digest: str,
        settings: CheckpointSpec,
        coordinator: SaveCoordinator,
        report: Report,
        storage: Storage,
    ) -> None:
        self._refused: set[str] = set()  # names reported because they could not be removed
        self._directory, self._storage, self._coordinator, self._report = directory, storage, coordinator, report
        self._run_id, self._job_digest = run_id, job_digest
        self._attempt, self._metrics_file = attempt.number, attempt.run.metrics_file
        self._retention = Retention(
            directory, run_id, attempt, settings=settings, owner=coordinator.owner, storage=storage
        )
        self.diverged: str | None = None
        self.superseded = False
        self.failed: dict[str, Any] | None = None
        self._recorded = True  # whether the failure of the last save, if any, was recorded

    def carry_out(self, save: Save, shard_bytes: Callable[[], memoryview] | None, digests: dict[str, str]) -> bool:
        """Make a save durable; returns whether it is. A rank that differs from rank 0 is named in `diverged`.

        `shard_bytes` returns the bytes of this rank's shard; None: it writes none. `digests` are those of the tensors
        that have to be the same on all ranks, by kind.
        """
        coordinator = self._coordinator
        receipt = {"plan": save.plan.signature, "digests": digests}
        if shard_bytes is not None:
            receipt |= self._write_shard(save, shard_bytes)
        if coordinator.rank != 0:
            coordinator.send(save.number, receipt)
            outcome = coordinator.outcome(save.number)
            self.diverged, self.superseded, self.failed = (outcome[k] for k in ("diverged", "superseded", "failed"))
            if not outcome["recorded"] and coordinator.rank == coordinator.deputy and self.failed is not None:
                self._report(events.CHECKPOINT_FAILED, self.failed)
            return bool(outcome["durable"])
        durable, self.failed, self._recorded = False, None, True
        try:
            durable = self._complete(save, receipt)
        finally:  # whatever happened here, the others wait for it
            outcome = {"durable": durable, "diverged": self.diverged, "superseded": self.superseded}
            coordinator.announce(save.number, {**outcome, "failed": self.failed, "recorded": self._recorded})
        return durable

    def _write_shard(self, save: Save, shard_bytes: Callable[[], memoryview]) -> dict[str, Any]:
        """Write, hash and flush this rank's file; the receipt describes it, or says why it failed."""
        rank, storage = self._coordinator.rank, self._storage
        path = self._temporary(save) / shard_name(rank)
        receipt = {"file": path.name}
        try:
            shard = shard_bytes()
            self._make_folder(path.parent)
            hashed = xxhash.xxh3_128()
            with created(storage, path) as fd:
                for at in range(0, len(shard), PIECE):
                    self._coordinator.check_given_up()
                    piece = shard[at : at + PIECE]
                    hashed.update(piece)
                    storage.write(fd, piece)
                    storage.begin_flush(fd, at, len(piece))
        except Exception as error:  # of any kind, because rank 0 waits for this receipt
            return {**receipt, "error": _reason(error), "rank": rank, "host": host_name()}
        return {**receipt, "bytes": len(shard), "xxh3": hashed.hexdigest()}

    def _make_folder(self, folder: Path) -> None:
        """Create a save's folder, and its parent in case that was removed while the run was training."""
        with contextlib.suppress(FileExistsError):
            try:
                self._storage.mkdir(folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self._storage.mkdir(self._directory)
                    self._storage.fsync_dir(self._directory.parent)
                self._storage.mkdir(folder)

    def _complete(self, save: Save, own: dict[str, Any]) -> bool:
        """Rank 0: wait for all ranks, then give the checkpoint its manifest and its name, and report."""
        try:
            got = {0: own, **self._coordinator.collect(save.number, range(1, self._coordinator.world_size))}
            manifest = self._manifest(save, got)
            self._compare(save, {rank: receipt["digests"] for rank, receipt in got.items()})
            self._publish(save, manifest)
        except AttemptSuperseded as error:
            self.superseded = True
            self._withdraw(save)
            self._report(events.CHECKPOINT_SKIPPED, {"step": save.step, "reason": str(error)})
            return False
        except Exception as error:  # of any kind: training continues
            self._withdraw(save)
            details = error.details if isinstance(error, SaveFailed) else _failure(error)
            self.failed = {"step": save.step, "last": save.is_last, **details}
            self._recorded = self._report(events.CHECKPOINT_FAILED, self.failed) is not False
            return False
        self._report(
            events.CHECKPOINT,
            {
                "step": save.step,
                "samples": save.samples,
                "bytes": manifest.size,
                "seconds": round(time.time() - save.began, 3),
            },
        )
        self._tidy_up(save.step)
        return True

    def _compare(self, save: Save, digests: dict[int, dict[str, str]]) -> None:
        """Refuse to combine ranks that do not hold the same tensors into one checkpoint."""
        own = digests[0]
        different = [rank for rank in sorted(digests) if digests[rank] != own]
        if not different:
            return
        kinds = sorted({kind for rank in different for kind in own if digests[rank].get(kind) != own[kind]})
        self.diverged = (
            f"at step {save.step} rank{'s' * (len(different) > 1)} {listed(different, 8)} of {len(digests)} did not "
            f"hold what rank 0 held: {' and '.join(_KINDS.get(kind, kind) for kind in kinds)}"
        )
        raise SaveFailed({"file": MANIFEST, "rank": different[0], "error": self.diverged, "host": host_name()})

    def _manifest(self, save: Save, receipts: dict[int, dict[str, Any]]) -> Manifest:
        for rank, receipt in sorted(receipts.items()):
            if "error" in receipt:
                raise SaveFailed({key: receipt[key] for key in ("file", "error", "rank", "host")})
            if receipt["plan"] != save.plan.signature:
                file = receipt.get("file", MANIFEST)
                raise SaveFailed({"file": file, "rank": rank, "error": "this rank holds different tensors from rank 0"})
            if "file" in receipt:
                self._check_visible(save, rank, receipt)
        return Manifest(
            run_id=self._run_id,
            step=save.step,
            samples=save.samples,
            epoch=save.epoch,
            world_size=self._coordinator.world_size,
            created=time.time(),
            job_digest=self._job_digest,
            versions={
                "cluster_ddp": cluster_ddp.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            shards={
                receipt["file"]: Shard(receipt["bytes"], receipt["xxh3"])
                for _, receipt in sorted(receipts.items())
                if "file" in receipt
            },
            tensors=save.plan.stored,
            scalars=save.scalars,
            aliases=save.plan.aliases,
            metrics=save.metrics,
            attempt=self._attempt,
        )

    def _check_visible(self, save: Save, rank: int, receipt: dict[str, Any]) -> None:
        """Refuse a shard that rank 0 does not see, because then the nodes do not share the disk."""
        path = self._temporary(save) / receipt["file"]
        size = path.stat().st_size if path.exists() else None
        if size != receipt["bytes"]:
            found = "is not there" if size is None else f"has {size} bytes, not {receipt['bytes']},"
            problem = f"{path} {found} as seen from rank 0's node: is the run directory on shared storage?"
            raise SaveFailed({"file": receipt["file"], "rank": rank, "error": problem})

    def _publish(self, save: Save, manifest: Manifest) -> None:
        """Write the manifest, then give the folder its final name, which makes the checkpoint valid."""
        storage, temporary, final = self._storage, self._temporary(save), self._directory / step_name(save.step)
        with created(storage, temporary / MANIFEST) as fd:
            storage.write(fd, manifest.to_bytes())
        storage.fsync_dir(temporary)
        with contextlib.suppress(OSError):  # there may be none, and a checkpoint does not need it
            storage.flush_lines(self._metrics_file)  # first: a resume does not log these lines again
        self._retention.refuse_superseded()
        try:
            self._retention.make_room(save.step)  # a rename cannot replace a folder that is not empty
        except CheckpointOfAnotherRun as error:
            problem = f"{final} is {error.problem}, and is kept; move it out of this run's folder"
            host = host_name()
            raise SaveFailed({"file": MANIFEST, "rank": 0, "host": host, "error": problem}) from error
        storage.rename(temporary, final)
        storage.fsync_dir(self._directory)
        self._retention.published(save.step, save.metrics)

    def _withdraw(self, save: Save) -> None:
        with contextlib.suppress(OSError):
            put_back_interrupted(self._storage, self._directory, own=self._coordinator.owner)
        with contextlib.suppress(OSError):
            self._storage.rmtree(self._temporary(save))

    def _tidy_up(self, newest: int) -> None:
        """Remove what is no longer kept. A refusal by the storage is reported once and retried after the next save."""
        refused = self._retention.tidy_up(newest)
        for name in sorted(refused.keys() - self._refused):
            self._report(events.REMOVAL_FAILED, {"name": name, "reason": f"cannot remove {name}: {refused[name]}"})
        self._refused |= refused.keys()

    def _temporary(self, save: Save) -> Path:
        return self._directory / temporary_name(save.step, self._coordinator.owner)


def _failure(error: Exception) -> dict[str, Any]:
    path = getattr(error, "filename", None)
    name = Path(os.fsdecode(path)).name if path else MANIFEST
    return {"file": name, "error": _reason(error), "rank": 0, "host": host_name()}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "the limit on the size of a file was reached (ulimit -f, or that of the file system)"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
