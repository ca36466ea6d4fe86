"""Reading a checkpoint into live tensors, in one pass over its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.train.checkpoint.errors import CheckpointMismatch, Differences
from cluster_ddp.train.checkpoint.manifest import Manifest, Stored
from cluster_ddp.train.checkpoint.plan import TORCH_DTYPES, memory_of
from cluster_ddp.train.checkpoint.verify import PIECE, Place, open_checkpoint, read_shard, verify


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held besides the tensors that were filled in place.

    Attributes
    ----------
    extra
        The optimizer's tensors that had no live tensor, on the CPU.
    differences
        What did not fit and was left as it was, when that was allowed.
    """

    step: int
    samples: int
    epoch: int
    world_size: int
    job_digest: str
    scalars: dict[str, Any]
    metrics: dict[str, float]
    extra: dict[str, Tensor] = field(default_factory=dict)
    differences: Differences = field(default_factory=Differences)


@dataclass(frozen=True)
class _Match:
    """Which live tensor takes which stored one; names of live tensors that share memory come once."""

    filled: dict[str, str]
    extra: dict[str, str]
    differences: Differences


def load(folder: Path, run_id: str, tensors: Mapping[str, Tensor], *, fit: bool) -> Restored:
    """Fill the live tensors from a checkpoint.

    Parameters
    ----------
    tensors
        The live tensors by their names in the checkpoint.
    fit
        Load what fits and report the rest, instead of refusing. Everything is verified before anything is touched then.

    Raises
    ------
    CheckpointDamaged
        A file is not what was written; the live tensors may hold anything.
    CheckpointOfAnotherRun
        Another run has saved it; none of the live tensors was touched.
    CheckpointMismatch
        The live tensors are others than those stored; none was touched.
    OSError
        The storage cannot be read; the live tensors may hold anything.
    """
    manifest = verify(folder, run_id) if fit else open_checkpoint(folder, run_id)
    match = _match(manifest, tensors)
    if match.differences and not fit:
        raise CheckpointMismatch(folder.name, match.differences)
    extra = {
        name: torch.empty(manifest.tensors[stored].shape, dtype=TORCH_DTYPES[manifest.tensors[stored].dtype])
        for name, stored in match.extra.items()
    }
    _fill(
        folder,
        manifest,
        [(tensors[name].detach(), stored) for name, stored in match.filled.items()]
        + [(extra[name], stored) for name, stored in match.extra.items()],
    )
    return Restored(
        step=manifest.step,
        samples=manifest.samples,
        epoch=manifest.epoch,
        world_size=manifest.world_size,
        job_digest=manifest.job_digest,
        scalars=manifest.scalars,
        metrics=manifest.metrics,
        extra=extra,
        differences=match.differences,
    )


def _match(manifest: Manifest, tensors: Mapping[str, Tensor]) -> _Match:
    stored_as = manifest.names()
    missing, shape, dtype, tied = [], [], [], []
    filled: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors):
        live = tensors[name]
        if name not in stored_as:
            missing.append(name)
            continue
        stored = manifest.tensors[stored_as[name]]
        place = memory_of(live)
        if tuple(live.shape) != stored.shape:
            shape.append(f"{name} {list(stored.shape)}, now {list(live.shape)}")
        elif TORCH_DTYPES.get(stored.dtype) != live.dtype:
            dtype.append(f"{name} {stored.dtype}, now {live.dtype}")
        elif place is None or place not in first:
            filled[name] = stored_as[name]
            if place is not None:
                first[place] = name
        elif filled[first[place]] != stored_as[name]:
            tied.append(f"{first[place]} and {name}")
    unknown = sorted(stored_as.keys() - tensors.keys())
    unfit = {name for name in tensors if name not in filled and memory_of(tensors[name]) not in first}
    extra = {
        name: stored_as[name]
        for name in unknown
        if name.startswith("optimizer.") and f"model.{_parameter_of(name)}" not in unfit
    }
    unexpected = [name for name in unknown if not name.startswith("optimizer.")]
    return _Match(filled, extra, Differences(*map(tuple, (missing, unexpected, shape, dtype, tied))))


def _parameter_of(name: str) -> str:
    """``optimizer.<fqn>.<state>`` -> ``<fqn>``."""
    return name.removeprefix("optimizer.").rpartition(".")[0]


def _fill(folder: Path, manifest: Manifest, wanted: list[tuple[Tensor, str]]) -> None:
    """Read every shard, whether anything of it is wanted or not: it is verified either way."""
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


def _place(tensor: Tensor, stored: Stored, piece: Tensor) -> tuple[Place, Tensor]:
    """Where the bytes of a stored tensor go, and the tensor that holds them afterwards."""
    if not tensor.is_contiguous():
        tensor = torch.empty(stored.shape, dtype=tensor.dtype)
    flat = tensor.reshape(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return flat.numpy().data, tensor

    def put(data: memoryview, offset: int) -> None:
        flat[offset : offset + len(data)].copy_(piece[: len(data)])

    return put, tensor
