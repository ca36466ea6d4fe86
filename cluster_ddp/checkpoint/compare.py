"""Compares two checkpoints bit by bit. No torch here, as nothing has to be computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cluster_ddp.checkpoint.format import Manifest
from cluster_ddp.checkpoint.verify import PIECE, read_shard, verify

_SEEN = "task.loop.buffers."


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints hold, and the names of what differs between them.

    `tensors` and `values` count what the first one holds; values are numbers, such as the step count of an optimizer or
    what a task keeps. Strings do not count: they name files, which each run has of its own.
    """

    tensors: int
    values: int
    different_tensors: tuple[str, ...]
    different_values: tuple[str, ...]

    @property
    def different(self) -> tuple[str, ...]:
        """The names of all that differs."""
        return self.different_tensors + self.different_values


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
    return Comparison(len(tensors), len(values), _different(tensors, others), _different(values, other_values))


def _different(one: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, ...]:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    # Which buffers a custom loop has seen to differ by rank depends on the steps of the attempt, and decides nothing.
    return tuple(name for name in names if not name.startswith(_SEEN) or (name in one and name in other))


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
    """Each number with its path, as JSON: unlike NaN, its text equals itself."""
    if isinstance(value, (dict, list)):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(f"{name}.{key}" if name else str(key), below)
    elif not isinstance(value, str):
        yield name, json.dumps(value)
