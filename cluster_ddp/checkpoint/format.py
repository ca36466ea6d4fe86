"""The format of a checkpoint on disk, its manifest and its shards: reading and writing both. No torch here.

A shard is a plain safetensors file: eight bytes with the length of the header (little endian), the header in JSON, the
tensors' bytes one after the other. ``manifest.json`` describes the checkpoint, its shards with their checksums, and
where each tensor is stored; it contains a digest of itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from cluster_ddp.run.reading import as_time, as_whole

FORMAT = 1
MAX_MANIFEST = 256 << 20  # bytes; ten thousand tensors take about ten million

# Bytes per element of each dtype, by the names that safetensors uses.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Item:
    """A tensor to store; `dtype` is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Entry:
    """A tensor inside a shard file, at bytes `begin` to `end` from the start of the file."""

    item: Item
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The layout of one shard file: its header, where its tensors are, and its total size in bytes."""

    head: bytes
    entries: tuple[Entry, ...]
    size: int


class ShardDamaged(ValueError):
    """A shard differs from what was written."""


def shard_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"shard-{rank:04d}.safetensors"


def lay_out(items: Iterable[Item], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file with these tensors and with `metadata` in its header.

    Wide elements come first, which aligns each tensor to its element size without gaps, which the format forbids.
    """
    offset = 0
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed = []
    for item in sorted(items, key=lambda item: (-ITEM_BYTES[item.dtype], item.name)):
        end = offset + item.bytes
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [offset, end]}
        placed.append((item, offset, end))
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    start = len(head)
    return Layout(head, tuple(Entry(item, start + a, start + b) for item, a, b in placed), start + offset)


def header_length(prefix: bytes | bytearray, file_bytes: int) -> int:
    """The length of the header, from the first 8 bytes of a file; `ShardDamaged` if the file is too short for it."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(file_bytes - 8, _MAX_HEADER):
        raise ShardDamaged("the file is too short for its header")
    return length


def read_header(header: bytes | bytearray, file_bytes: int) -> tuple[Entry, ...]:
    """The tensors of a shard in the order of their bytes; `ShardDamaged` unless they fill the file without gaps."""
    start = 8 + len(header)
    try:
        described = json.loads(header)
        entries = [_entry(name, value, start) for name, value in described.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise ShardDamaged(f"the header cannot be read: {error}") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = start
    for entry in entries:
        if entry.begin != position or entry.end - entry.begin != entry.item.bytes:
            raise ShardDamaged(f"the header gives tensor {entry.item.name} a wrong position or size")
        position = entry.end
    if position != file_bytes:
        raise ShardDamaged("the file is longer or shorter than its header says")
    return tuple(entries)


def _entry(name: str, value: dict[str, object], start: int) -> Entry:
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(dtype, str) and dtype in ITEM_BYTES):
        raise ValueError(f"dtype {dtype!r} of {name}")
    begin, end = _sizes(offsets)
    return Entry(Item(name, dtype, _sizes(shape)), start + begin, start + end)


class ManifestDamaged(ValueError):
    """A manifest differs from what was written."""


class UnknownFormat(ValueError):
    """A manifest is intact but was written by a different version of cluster_ddp."""


@dataclass(frozen=True)
class Shard:
    """A file of the checkpoint: its size and the xxh3 (128 bits, hexadecimal) of all its bytes."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint; `dtype` is safetensors' name for it."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about one checkpoint except the tensors' bytes.

    `created` is in Unix seconds. `aliases` maps the name of a tensor that shares memory with another (tied weights)
    to the name under which the bytes are stored. `metrics` are the latest when it was saved. `attempt` is the one that
    saved it; None if an older version of this package did.
    """

    run_id: str
    step: int
    samples: int
    epoch: int
    world_size: int
    created: float
    job_digest: str
    versions: dict[str, str]
    shards: dict[str, Shard]
    tensors: dict[str, StoredTensor]
    scalars: dict[str, Any]
    aliases: dict[str, str]
    metrics: dict[str, float]
    attempt: int | None = None

    @property
    def digest(self) -> str:
        """The digest of its content; it differs between two checkpoints of the same step."""
        return digest(self._body())

    @property
    def size(self) -> int:
        """Total size of all shards, in bytes."""
        return sum(shard.bytes for shard in self.shards.values())

    @property
    def has_averages(self) -> bool:
        """Whether the checkpoint also contains averages of the weights."""
        return any(name.startswith("ema.") for name in self.names())

    def names(self) -> dict[str, str]:
        """Each name that can be loaded, including aliases, with the name under which it is stored."""
        return {**{name: name for name in self.tensors}, **self.aliases}

    def stored(self) -> dict[str, StoredTensor]:
        """The stored tensor for each name that can be loaded, including aliases."""
        return {name: self.tensors[stored] for name, stored in self.names().items()}

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``, with its digest."""
        body = self._body()
        return encode({**body, "digest": digest(body)})

    def _body(self) -> dict[str, Any]:
        # The keys that identify the checkpoint come first: `run.lineage.steps_that_count` reads no further.
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch,
            **({} if self.attempt is None else {"attempt": self.attempt}),
            "world_size": self.world_size,
            "created": self.created,
            "job_digest": self.job_digest,
            "versions": self.versions,
            "metrics": self.metrics,
            "scalars": self.scalars,
            "shards": {name: {"bytes": shard.bytes, "xxh3": shard.xxh3} for name, shard in self.shards.items()},
            "tensors": {
                name: {"shard": stored.shard, "dtype": stored.dtype, "shape": list(stored.shape)}
                for name, stored in self.tensors.items()
            },
            "aliases": self.aliases,
        }


def encode(body: Mapping[str, Any]) -> bytes:
    """Serialize a manifest in its only valid form, so that even a changed space is detected."""
    return json.dumps(body, indent=1).encode() + b"\n"


def digest(body: Mapping[str, Any]) -> str:
    """The xxh3 (128 bits) of the manifest without its digest, as JSON with sorted keys and no spaces."""
    plain = {key: value for key, value in body.items() if key != "digest"}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()))


def read_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of ``manifest.json``; `ManifestDamaged` unless it is intact."""
    try:
        return _read(data)
    except RecursionError as error:
        raise ManifestDamaged("it is nested too deeply") from error


def _read(data: bytes) -> Manifest:
    try:
        body = json.loads(data)
    except (ValueError, MemoryError) as error:
        raise ManifestDamaged("it is not valid JSON") from error
    if not isinstance(body, dict) or encode(body) != data:
        raise ManifestDamaged("it has been changed since it was written")
    if body.get("digest") != digest(body):
        raise ManifestDamaged("its content does not match its digest")
    if body.get("format") != FORMAT:
        raise UnknownFormat(f"has format {body.get('format')!r}, this version of cluster_ddp reads {FORMAT}")
    try:
        return _from_body(body)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ManifestDamaged(f"it was not written by cluster_ddp, or is damaged ({error})") from error


def _from_body(body: dict[str, Any]) -> Manifest:
    shards = {name: Shard(_count(value["bytes"]), str(value["xxh3"])) for name, value in body["shards"].items()}
    tensors = {
        name: StoredTensor(value["shard"], value["dtype"], _sizes(value["shape"]))
        for name, value in body["tensors"].items()
    }
    aliases, scalars = body.get("aliases", {}), body["scalars"]
    for name, stored in tensors.items():
        if stored.shard not in shards or stored.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has an unknown dtype, or is in a file that is not listed")
        if prod(stored.shape) * ITEM_BYTES[stored.dtype] > shards[stored.shard].bytes:
            raise ValueError(f"tensor {name!r} is larger than its shard")
    if any(target not in tensors or name in tensors for name, target in aliases.items()):
        raise ValueError("an alias names no tensor")
    if not isinstance(scalars, dict):
        raise ValueError("the scalars are not a JSON object")
    _check_numbers({name: value for name, value in scalars.items() if name != "task"})
    return Manifest(
        run_id=str(body["run_id"]),
        step=_count(body["step"]),
        samples=_count(body["samples"]),
        epoch=_count(body["epoch"]),
        world_size=_count(body["world_size"]),
        created=_moment(body["created"]),
        job_digest=str(body["job_digest"]),
        versions=dict(body["versions"]),
        shards=shards,
        tensors=tensors,
        scalars=scalars,
        aliases=dict(aliases),
        metrics={str(name): float(value) for name, value in body.get("metrics", {}).items()},
        attempt=_count(body["attempt"]) if "attempt" in body else None,
    )


def _check_numbers(value: object) -> None:
    """Raise `ValueError` for an integer that is too large for a float."""
    if isinstance(value, int) and value.bit_length() > sys.float_info.max_exp:
        raise ValueError("an integer in the scalars is too large")
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(below)


def _count(value: object) -> int:
    count = as_whole(value)
    if count is None:
        raise ValueError(f"{value!r} is not a count")
    return count


def _moment(value: object) -> float:
    moment = as_time(value)
    if moment is None:
        raise ValueError(f"created: {value!r} is not a time")
    return moment


def _sizes(value: object) -> tuple[int, ...]:
    """A JSON list of non-negative integers, as a tuple; `ValueError` for anything else."""
    if not isinstance(value, list) or any(as_whole(number) is None for number in value):
        raise ValueError(f"{value!r} is not a shape")
    return tuple(value)
