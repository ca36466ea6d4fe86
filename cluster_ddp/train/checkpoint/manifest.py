"""The manifest of a checkpoint: what it is, which files belong to it, where each tensor lies. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from cluster_ddp.train.checkpoint.shards import ITEM_BYTES, whole_numbers

FORMAT = 1


class ManifestDamaged(ValueError):
    """A manifest is not what was written."""


class UnknownFormat(ValueError):
    """A manifest is sound, but of another version of cluster_ddp."""


@dataclass(frozen=True)
class Shard:
    """A file of the checkpoint: its size and the xxh3 (128 bits, hexadecimal) of all its bytes."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint; `dtype` as safetensors calls it."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about one checkpoint except the tensors' bytes.

    `created` is Unix seconds. `aliases` maps the name of a tensor that shares its memory with another (tied weights)
    to the name under which the bytes are stored. `metrics` are those known when it was saved.
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
    tensors: dict[str, Stored]
    scalars: dict[str, Any]
    aliases: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of all shards together."""
        return sum(shard.bytes for shard in self.shards.values())

    def names(self) -> dict[str, str]:
        """Each name that can be loaded, aliases too, with the name under which it is stored."""
        return {**{name: name for name in self.tensors}, **self.aliases}

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``, with the digest of itself."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "run_id": self.run_id,
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch,
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
        return encode({**body, "digest": digest(body)})


def encode(body: Mapping[str, Any]) -> bytes:
    """The one way in which a manifest is written, so that not even a changed space goes unnoticed."""
    return json.dumps(body, indent=1).encode() + b"\n"


def digest(body: Mapping[str, Any]) -> str:
    """The xxh3 (128 bits) of the manifest without its digest, as JSON with sorted keys and no spaces."""
    plain = {key: value for key, value in body.items() if key != "digest"}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()))


def read_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of ``manifest.json``; `ManifestDamaged` unless it is whole and sound."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestDamaged("not readable as JSON") from error
    if not isinstance(body, dict) or encode(body) != data:
        raise ManifestDamaged("its bytes are not those that were written")
    if body.get("digest") != digest(body):
        raise ManifestDamaged("its digest is not that of its content")
    if body.get("format") != FORMAT:
        raise UnknownFormat(f"has format {body.get('format')!r}, this version of cluster_ddp reads {FORMAT}")
    try:
        return _from_body(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestDamaged(f"its content is not that of a manifest ({error})") from error


def _from_body(body: dict[str, Any]) -> Manifest:
    shards = {name: Shard(_count(value["bytes"]), str(value["xxh3"])) for name, value in body["shards"].items()}
    tensors = {
        name: Stored(value["shard"], value["dtype"], whole_numbers(value["shape"]))
        for name, value in body["tensors"].items()
    }
    aliases, scalars = body.get("aliases", {}), body["scalars"]
    for name, stored in tensors.items():
        if stored.shard not in shards or stored.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r}")
    if any(target not in tensors or name in tensors for name, target in aliases.items()):
        raise ValueError("aliases")
    if not isinstance(scalars, dict):
        raise ValueError("scalars")
    return Manifest(
        run_id=str(body["run_id"]),
        step=_count(body["step"]),
        samples=_count(body["samples"]),
        epoch=_count(body["epoch"]),
        world_size=_count(body["world_size"]),
        created=float(body["created"]),
        job_digest=str(body["job_digest"]),
        versions=dict(body["versions"]),
        shards=shards,
        tensors=tensors,
        scalars=scalars,
        aliases=dict(aliases),
        metrics={str(name): float(value) for name, value in body.get("metrics", {}).items()},
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a count: {value!r}")
    return value
