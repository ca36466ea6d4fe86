"""Making a save durable: each writing rank its shard, rank 0 the whole. Runs in the background, no collectives."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

import cluster_ddp
from cluster_ddp.run import events
from cluster_ddp.run.storage import Storage
from cluster_ddp.train.checkpoint.folders import (
    MANIFEST,
    put_back_replaced,
    remove_left_overs,
    removed_name,
    replaced_name,
    step_name,
    steps_in,
    temporary_name,
)
from cluster_ddp.train.checkpoint.manifest import Manifest, ManifestDamaged, Shard, Stored, UnknownFormat, read_manifest
from cluster_ddp.train.checkpoint.plan import SavePlan, shard_name
from cluster_ddp.train.checkpoint.receipts import Receipts
from cluster_ddp.train.checkpoint.retention import surplus

if TYPE_CHECKING:
    from cluster_ddp.spec import CheckpointSpec

Report = Callable[[str, dict[str, Any]], object]
_PIECE = 16 << 20  # bytes hashed and written at a time


@dataclass(frozen=True)
class Save:
    """One save: `number` counts those of this process, the same on all ranks."""

    number: int
    step: int
    samples: int
    epoch: int
    scalars: dict[str, Any]
    metrics: dict[str, float]
    plan: SavePlan
    began: float  # Unix seconds


class SaveFailed(Exception):
    """A save cannot be completed; `details` go into the event."""

    def __init__(self, details: dict[str, Any]) -> None:
        super().__init__(details.get("error"))
        self.details = details


class Writer:
    """Carries out saves, one at a time, on the thread that calls `carry_out`.

    Nothing that goes wrong with the storage or another rank leaves it as an exception: the save is given up, its folder
    removed, and rank 0 reports ``checkpoint-failed``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        job_digest: str,
        settings: CheckpointSpec,
        receipts: Receipts,
        report: Report,
        storage: Storage,
    ) -> None:
        self._directory, self._storage, self._receipts, self._report = directory, storage, receipts, report
        self._run_id, self._job_digest, self._settings = run_id, job_digest, settings
        self._metrics: dict[int, dict[str, float]] = {}

    def carry_out(self, save: Save, shard: memoryview | None) -> bool:
        """Make a save durable; returns whether it is. `shard` are the bytes of this rank's file, if it writes one.

        Raises
        ------
        Abandoned
            This process ends before the save was complete.
        """
        receipts = self._receipts
        receipt = self._write_shard(save, shard) if shard is not None else None
        if receipts.rank != 0:
            if receipt is not None:
                receipts.send(save.number, receipt)
            return receipts.outcome(save.number)
        durable = False
        try:
            durable = self._complete(save, receipt)
        finally:
            receipts.announce(save.number, durable)  # the others wait for it, whatever happened here
        return durable

    def _write_shard(self, save: Save, shard: memoryview) -> dict[str, Any]:
        """Write, hash and flush this rank's file; the receipt says what it is, or why there is none."""
        rank, storage = self._receipts.rank, self._storage
        path = self._temporary(save) / shard_name(rank)
        receipt = {"file": path.name, "plan": save.plan.signature}
        try:
            with contextlib.suppress(FileExistsError):
                storage.mkdir(path.parent)
            hashed = xxhash.xxh3_128()
            with _created(storage, path) as fd:
                for at in range(0, len(shard), _PIECE):
                    self._receipts.check_given_up()
                    piece = shard[at : at + _PIECE]
                    hashed.update(piece)
                    storage.write(fd, piece)
                    storage.begin_flush(fd, at, len(piece))
        except Exception as error:  # whatever it is, rank 0 must hear of it: it waits for this receipt
            return {**receipt, "error": _reason(error), "rank": rank, "host": socket.gethostname()}
        return {**receipt, "bytes": len(shard), "xxh3": hashed.hexdigest()}

    def _complete(self, save: Save, own: dict[str, Any] | None) -> bool:
        """Rank 0: wait for all shards, then give the checkpoint its manifest and its name, and report."""
        try:
            got = self._receipts.collect(save.number, [rank for rank in save.plan.layouts if rank != 0])
            if own is not None:
                got[0] = own
            manifest = self._manifest(save, got)
            self._publish(save, manifest)
        except Exception as error:  # the training goes on, whatever it is
            self._withdraw(save)
            details = error.details if isinstance(error, SaveFailed) else _failure(error)
            self._report(events.CHECKPOINT_FAILED, {"step": save.step, **details})
            return False
        self._metrics[save.step] = save.metrics
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

    def _manifest(self, save: Save, receipts: dict[int, dict[str, Any]]) -> Manifest:
        for rank, receipt in sorted(receipts.items()):
            if "error" in receipt:
                raise SaveFailed({key: receipt[key] for key in ("file", "error", "rank", "host")})
            if receipt["plan"] != save.plan.signature:
                raise SaveFailed(
                    {"file": receipt["file"], "rank": rank, "error": "this rank holds other tensors than rank 0"}
                )
            self._check_visible(save, rank, receipt)
        return Manifest(
            run_id=self._run_id,
            step=save.step,
            samples=save.samples,
            epoch=save.epoch,
            world_size=self._receipts.world_size,
            created=time.time(),
            job_digest=self._job_digest,
            versions={
                "cluster_ddp": cluster_ddp.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            shards={
                receipt["file"]: Shard(receipt["bytes"], receipt["xxh3"]) for _, receipt in sorted(receipts.items())
            },
            tensors={
                entry.item.name: Stored(shard_name(rank), entry.item.dtype, entry.item.shape)
                for rank, layout in save.plan.layouts.items()
                for entry in layout.entries
            },
            scalars=save.scalars,
            aliases=save.plan.aliases,
            metrics=save.metrics,
        )

    def _check_visible(self, save: Save, rank: int, receipt: dict[str, Any]) -> None:
        """A shard that rank 0 does not see is on a disk that is not shared between the nodes."""
        path = self._temporary(save) / receipt["file"]
        size = path.stat().st_size if path.exists() else None
        if size != receipt["bytes"]:
            found = "is not there" if size is None else f"has {size} bytes, not {receipt['bytes']},"
            text = f"{path} {found} as seen from rank 0's node: is the run directory on shared storage?"
            raise SaveFailed({"file": receipt["file"], "rank": rank, "error": text})

    def _publish(self, save: Save, manifest: Manifest) -> None:
        storage, temporary, final = self._storage, self._temporary(save), self._directory / step_name(save.step)
        with _created(storage, temporary / MANIFEST) as fd:
            storage.write(fd, manifest.to_bytes())
        storage.fsync_dir(temporary)
        if final.exists() and (theirs := self._foreign(save.step)):
            raise SaveFailed(
                {
                    "file": MANIFEST,
                    "rank": 0,
                    "host": socket.gethostname(),
                    "error": f"{final} is of another run, {theirs}, and stays; move it out of this run's folder",
                }
            )
        if final.exists():  # from before a crash or a fall-back; a folder that is not empty cannot be renamed onto
            storage.rename(final, self._directory / replaced_name(save.step, self._receipts.owner))
            storage.fsync_dir(self._directory)
        storage.rename(temporary, final)
        storage.fsync_dir(self._directory)

    def _withdraw(self, save: Save) -> None:
        with contextlib.suppress(OSError):
            put_back_replaced(self._storage, self._directory, own=self._receipts.owner)
        with contextlib.suppress(OSError):
            self._storage.rmtree(self._temporary(save))

    def _tidy_up(self, newest: int) -> None:
        """Remove what is kept no longer. What the storage refuses now is tried again after the next save."""
        settings, owner = self._settings, self._receipts.owner
        with contextlib.suppress(OSError):
            best = settings.keep_best
            steps = [step for step in steps_in(self._directory) if not self._foreign(step)]
            for step in surplus(
                steps,
                {step: self._metrics[step] for step in steps if step in self._metrics} if best else {},
                newest_proven=newest,
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
                best=(best.metric, best.mode) if best else None,
            ):
                # Renamed first: a folder with a final name is never half removed.
                self._storage.rename(self._directory / step_name(step), self._directory / removed_name(step, owner))
            self._storage.fsync_dir(self._directory)
            remove_left_overs(self._storage, self._directory, own=owner)

    def _foreign(self, step: int) -> str | None:
        """The run that has saved the checkpoint of a step, when it is another one: theirs is not for us to remove.

        Notes the metrics of our own.
        """
        if step in self._metrics:
            return None
        try:
            manifest = read_manifest((self._directory / step_name(step) / MANIFEST).read_bytes())
        except (OSError, ManifestDamaged, UnknownFormat):
            return None  # not rated: whether it is damaged is for a restore to find
        if manifest.run_id != self._run_id:
            return manifest.run_id
        self._metrics[step] = manifest.metrics
        return None

    def _temporary(self, save: Save) -> Path:
        return self._directory / temporary_name(save.step, self._receipts.owner)


@contextmanager
def _created(storage: Storage, path: Path) -> Iterator[int]:
    """A new file, flushed at the end and closed whatever happens."""
    fd = storage.open_write(path)
    try:
        yield fd
        storage.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.close(fd)
        raise
    storage.close(fd)


def _failure(error: Exception) -> dict[str, Any]:
    path = getattr(error, "filename", None)
    name = Path(os.fsdecode(path)).name if path else MANIFEST
    return {"file": name, "error": _reason(error), "rank": 0, "host": socket.gethostname()}


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
