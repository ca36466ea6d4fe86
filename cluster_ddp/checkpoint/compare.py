"""Compares two checkpoints bit by bit. No torch here, as nothing has to be computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cluster_ddp.checkpoint.format import Manifest
from cluster_ddp.checkpoint.verify import PIECE, read_shard, verify


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints hold, and the names of what differs between them.

    `tensors` and `values` count what the first one holds; values are what is not a tensor, such as the step count of an
    optimizer or what a task keeps.
    """

    tensors: int
    values: int
    different: tuple[str, ...]


def compare(one: Path, other: Path) -> Comparison:
    """Compare the state in two checkpoints, which may be of different runs.

    Raises
    ------
    CheckpointDamaged, CheckpointUnreadable
        One of them is not intact.
    OSError
        The storage cannot be read.
    """
    manifests = verify(one), verify(other)
    tensors, others = (_tensors(folder, manifest) for folder, manifest in zip((one, other), manifests, strict=True))
    values, other_values = (dict(_values("", manifest.scalars)) for manifest in manifests)
    different = [name for name in {**tensors, **others} if tensors.get(name) != others.get(name)]
    different += [name for name in {**values, **other_values} if values.get(name) != other_values.get(name)]
    return Comparison(len(tensors), len(values), tuple(different))


def _tensors(folder: Path, manifest: Manifest) -> dict[str, tuple[Any, ...]]:
    """The dtype, shape and checksum of each tensor."""
    sums = {name: xxhash.xxh3_128() for name in manifest.tensors}
    places = {name: lambda piece, _, hashed=hashed: hashed.update(piece) for name, hashed in sums.items()}
    for name, shard in manifest.shards.items():
        read_shard(folder / name, shard, manifest, places, memoryview(bytearray(PIECE)))
    return {
        name: (stored.dtype, stored.shape, sums[manifest.names()[name]].hexdigest())
        for name, stored in manifest.stored().items()
    }


def _values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each value with its path, as JSON: unlike NaN, its text equals itself."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _values(f"{name}.{key}" if name else str(key), below)
    else:
        yield name, json.dumps(value)
