"""Restores the newest checkpoint that every rank finds intact, reading and verifying it in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.checkpoint.coordinator import SaveCoordinator
from cluster_ddp.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointOfAnotherRun,
    CheckpointUnreadable,
    Differences,
    NoIntactCheckpoint,
)
from cluster_ddp.checkpoint.folders import (
    abandoned_in,
    damaged_in,
    put_back_interrupted,
    put_back_removed,
    remove_leftovers,
    set_aside_damaged,
)
from cluster_ddp.checkpoint.format import Manifest, StoredTensor
from cluster_ddp.checkpoint.plan import TORCH_DTYPES, memory_of
from cluster_ddp.checkpoint.verify import PIECE, Place, open_checkpoint, read_shard
from cluster_ddp.checkpoint.writer import Report
from cluster_ddp.run import events
from cluster_ddp.run.directory import MANIFEST, RunDirectory, step_name
from cluster_ddp.run.errors import resume_command
from cluster_ddp.run.lineage import read_lineage, steps_that_count
from cluster_ddp.run.storage import Storage

# Tensors that the caller restores itself, because they need not exist before the first step.
_EXTRA = ("optimizer.", "buffer.", "extra.", "task.")

# Raises a ValueError unless the scalars, and the tensors they refer to, are of the form that a save was given.
Check = Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], None]


@dataclass(frozen=True)
class Restored:
    """A checkpoint whose tensors were read into live ones."""

    manifest: Manifest
    # Stored tensors without a live one, on the CPU; names that shared memory when saved share it here
    extra: dict[str, Tensor]

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def scalars(self) -> dict[str, Any]:
        return self.manifest.scalars


def load(folder: Path, run_id: str, tensors: Mapping[str, Tensor], check: Check) -> Restored:
    """Fill the live tensors from a checkpoint.

    Raises
    ------
    CheckpointDamaged
        A file is not what was written; the live tensors may contain anything.
    CheckpointOfAnotherRun
        Another run saved it; no live tensor was touched.
    CheckpointMismatch
        The live tensors do not match those stored; none was touched.
    OSError
        The storage cannot be read; the live tensors may contain anything.
    """
    manifest = open_checkpoint(folder, run_id)
    try:
        check(manifest.scalars, manifest.stored())
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(folder.name, [f"{MANIFEST}: {error}"]) from error
    source_of, differences = match(manifest, tensors)
    if differences:
        raise CheckpointMismatch(folder.name, differences)
    sources = [(tensors[name].detach(), stored) for name, stored in source_of.items()]
    extra_of = {name: stored for name, stored in manifest.names().items() if name not in tensors}
    made = {stored: _empty(manifest.tensors[stored]) for stored in extra_of.values()}
    _fill(folder, manifest, [*sources, *((tensor, stored) for stored, tensor in made.items())])
    return Restored(manifest, {name: made[stored] for name, stored in extra_of.items()})


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])


def match(manifest: Manifest, tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], Differences]:
    """Map live tensors to stored ones (once for those that share memory), and list what does not match."""
    stored_as = manifest.names()
    missing, shape, dtype, tied = [], [], [], []
    source_of: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors):
        live = tensors[name]
        if name not in stored_as:
            missing.append(name)
            continue
        stored = manifest.tensors[stored_as[name]]
        memory = memory_of(live)
        if tuple(live.shape) != stored.shape:
            shape.append(f"{name} {list(stored.shape)}, now {list(live.shape)}")
        elif TORCH_DTYPES.get(stored.dtype) != live.dtype:
            dtype.append(f"{name} {stored.dtype}, now {live.dtype}")
        elif memory is None or memory not in first:
            source_of[name] = stored_as[name]
            if memory is not None:
                first[memory] = name
        elif source_of[first[memory]] != stored_as[name]:
            tied.append(f"{first[memory]} and {name}")
    unexpected = [name for name in sorted(stored_as) if name not in tensors and not name.startswith(_EXTRA)]
    return source_of, Differences(*map(tuple, (missing, unexpected, shape, dtype, tied)))


def _fill(folder: Path, manifest: Manifest, wanted: list[tuple[Tensor, str]]) -> None:
    """Read every shard in full, even if none of its tensors is wanted, so that all of them are verified."""
    targets: dict[str, list[Tensor]] = {}
    for tensor, stored in wanted:
        targets.setdefault(stored, []).append(tensor)
    places: dict[str, Place] = {}
    later: list[tuple[Tensor, Tensor]] = []
    piece = torch.empty(PIECE, dtype=torch.uint8, pin_memory=any(tensor.is_cuda for tensor, _ in wanted))
    for stored, (tensor, *others) in targets.items():
        places[stored], source = _place(tensor, manifest.tensors[stored], piece)
        later += [(other, source) for other in (tensor, *others) if other is not source]
    for name, shard in sorted(manifest.shards.items()):
        read_shard(folder / name, shard, manifest, places, piece.numpy().data)
    for tensor, source in later:
        tensor.copy_(source)


def _place(tensor: Tensor, stored: StoredTensor, piece: Tensor) -> tuple[Place, Tensor]:
    """Where to put the bytes of a stored tensor, and the tensor that contains them afterwards."""
    if not tensor.is_contiguous():
        tensor = torch.empty(stored.shape, dtype=tensor.dtype)
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
    if tensor.device.type == "cpu":
        return flat.numpy().data, tensor

    def put(data: memoryview, offset: int) -> None:
        flat[offset : offset + len(data)].copy_(piece[: len(data)])

    return put, tensor


@dataclass(frozen=True)
class _Finding:
    """What one rank found when reading a checkpoint."""

    restored: Restored | None = None
    damage: tuple[str, ...] = ()  # one string per file
    unreadable: str = ""  # or of another run; the checkpoint is skipped and left in place
    mismatch: CheckpointMismatch | None = None


class Restore:
    """One restore, on one rank; all ranks take part together."""

    def __init__(
        self, directory: Path, run_id: str, *, coordinator: SaveCoordinator, storage: Storage, report: Report
    ) -> None:
        self._directory, self._run_id = directory, run_id
        self._coordinator, self._storage, self._report = coordinator, storage, report
        self._refused: dict[int, str] = {}
        self._some_unreadable = False

    def into(self, tensors: Mapping[str, Tensor], check: Check) -> Restored | None:
        """Fill the tensors; see `Checkpointer.restore`."""
        main, storage, directory = self._coordinator.rank == 0, self._storage, self._directory
        if main:
            with contextlib.suppress(OSError):  # read-only storage can still be read
                put_back_interrupted(storage, directory, own=self._coordinator.owner)
        while True:
            step, failure, for_good = self._coordinator.from_rank_0(self._choose() if main else None)
            if failure:
                raise (NoIntactCheckpoint if for_good else CheckpointError)(failure)
            if step is None:
                break
            finding = self._read(step, tensors, check)
            if self._accepted(step, finding):
                break
        if main:
            with contextlib.suppress(OSError):
                remove_leftovers(storage, directory, own=self._coordinator.owner)
        return None if step is None else finding.restored

    def _choose(self) -> tuple[int | None, str, bool]:
        """The next step to try; if None, why there is none (empty if there never was one) and whether that is final."""
        try:
            there, damaged, abandoned = self._steps(), damaged_in(self._directory), list(abandoned_in(self._directory))
        except OSError as error:
            return None, f"cannot read {self._directory}: {error.strerror}", False
        wanted = [step for step in there if step not in self._refused]
        if wanted:
            return max(wanted), "", False
        if self._refused or damaged:
            found = [f"{step_name(step)}: {why}" for step, why in self._refused.items()] or damaged
            found += [f"{name}: may be intact, but a newer attempt has gone on without it" for name in abandoned]
            return None, (
                f"no intact checkpoint is left in {self._directory}, and nothing was deleted. Put an intact copy back "
                "under its step- name, or move that folder away to start from the beginning; then: "
                f"{resume_command(self._run_id)}\n  " + "\n  ".join(found)
            ), not self._some_unreadable  # fmt: skip
        return None, "", False

    def _steps(self) -> list[int]:
        """The steps of the checkpoints that count; if all were tried, including those that were being removed."""
        lineage = read_lineage(RunDirectory(self._directory.parent))
        there = steps_that_count(self._directory, lineage)
        if set(there) <= self._refused.keys():
            with contextlib.suppress(OSError):
                put_back_removed(self._storage, self._directory)
            there = steps_that_count(self._directory, lineage)
        return there

    def _read(self, step: int, tensors: Mapping[str, Tensor], check: Check) -> _Finding:
        try:
            return _Finding(load(self._directory / step_name(step), self._run_id, tensors, check))
        except CheckpointDamaged as error:
            return _Finding(damage=tuple(error.problems))
        except CheckpointOfAnotherRun as error:
            return _Finding(unreadable=error.problem)
        except (OSError, CheckpointUnreadable) as error:
            return _Finding(unreadable=f"cannot be read: {getattr(error, 'strerror', None) or error}")
        except CheckpointMismatch as error:
            return _Finding(mismatch=error)

    def _accepted(self, step: int, finding: _Finding) -> bool:
        """Whether all ranks can resume from what they read; if not, rank 0 sets a damaged checkpoint aside."""
        findings = self._coordinator.to_rank_0(
            {
                "damage": finding.damage,
                "unreadable": finding.unreadable,
                "mismatch": str(finding.mismatch or ""),
                "digest": finding.restored.manifest.digest if finding.restored else "",
            }
        )
        decision = self._coordinator.from_rank_0(self._decide(step, findings) if self._coordinator.rank == 0 else None)
        if decision["mismatch"]:
            raise finding.mismatch or CheckpointError(decision["mismatch"])
        if decision["refused"]:
            self._refused[step] = decision["refused"]
            return False
        return True

    def _decide(self, step: int, findings: list[dict[str, Any]]) -> dict[str, str]:
        """Rank 0: decide what to do with a checkpoint from all ranks' findings. Damage found by one rank is enough."""
        damage = list(dict.fromkeys(problem for finding in findings for problem in finding["damage"]))
        unreadable = next((finding["unreadable"] for finding in findings if finding["unreadable"]), "")
        mismatch = next((finding["mismatch"] for finding in findings if finding["mismatch"]), "")
        if not unreadable and not mismatch and len({finding["digest"] for finding in findings}) > 1:
            unreadable = "another attempt has replaced it while it was read"
        if not damage and not unreadable:
            return {"refused": "", "mismatch": mismatch}
        self._some_unreadable |= not damage
        moved = self._set_aside(step) if damage else None
        problems = damage or [unreadable]
        self._report(events.CHECKPOINT_DAMAGED, {"step": step, "problems": problems, "set_aside": moved})
        return {"refused": "; ".join(problems), "mismatch": ""}

    def _set_aside(self, step: int) -> str | None:
        try:
            return set_aside_damaged(self._storage, self._directory, step).name
        except OSError:
            return None  # it stays where it is; this process does not try it again
