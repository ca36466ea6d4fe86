"""Who writes what: each tensor is given to one of the writing ranks, in the same way on every rank."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from cluster_ddp.train.checkpoint.errors import CheckpointError
from cluster_ddp.train.checkpoint.shards import Item, Layout, lay_out

_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
# By safetensors' name; without the dtypes that this torch does not have.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _DTYPE_NAMES.items() if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class SavePlan:
    """The shards of a save and who writes them.

    Attributes
    ----------
    layouts
        By writing rank, what its shard looks like. Ranks with nothing to write have none.
    aliases
        Names of tensors that share their memory with another, and that other's name.
    alike
        Names of the tensors that are the same on all ranks; they change only in the optimizer's step.
    signature
        Equal on all ranks exactly when they made the same plan.
    """

    layouts: dict[int, Layout]
    aliases: dict[str, str]
    alike: frozenset[str]
    signature: str


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"shard-{rank:04d}.safetensors"


def describe(tensors: Mapping[str, Tensor]) -> tuple[tuple[Item, ...], dict[str, str], frozenset[str]]:
    """What is to be stored, the aliases, and the names whose values are the same on all ranks.

    Only what the optimizer moves, and the optimizer's state for it, is known to be the same everywhere. Buffers are
    not: BatchNorm's running statistics differ between ranks. Those are stored from rank 0.
    """
    items, aliases, seen = [], {}, dict[tuple[object, ...], str]()
    for name in sorted(tensors):
        tensor = tensors[name]
        place = memory_of(tensor)
        if place is not None and place in seen:
            aliases[name] = seen[place]
            continue
        if place is not None:
            seen[place] = name
        if tensor.dtype not in _CODES:
            raise CheckpointError(
                f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot hold: keep it in another dtype"
            )
        items.append(Item(name, _CODES[tensor.dtype], tuple(tensor.shape)))
    optimized = {
        name.removeprefix("optimizer.").rpartition(".")[0] for name in tensors if name.startswith("optimizer.")
    }
    alike = frozenset(
        item.name
        for item in items
        if item.name.startswith("optimizer.")
        or isinstance(tensors[item.name], nn.Parameter)
        or item.name.partition(".")[2] in optimized
    )
    return tuple(items), aliases, alike


def memory_of(tensor: Tensor) -> tuple[object, ...] | None:
    """What two tensors have in common when they are the same memory seen in the same way; None for empty ones."""
    if tensor.numel() == 0:
        return None
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def make_plan(
    items: Sequence[Item], aliases: Mapping[str, str], alike: frozenset[str], writers: Sequence[int]
) -> SavePlan:
    """Divide the tensors among the writing ranks so that the largest share of bytes is small (longest first)."""
    shares: dict[int, list[Item]] = {rank: [] for rank in writers}
    shares[0] = [item for item in items if item.name not in alike]
    loads = [(sum(item.bytes for item in share), rank) for rank, share in shares.items()]
    heapq.heapify(loads)
    for item in sorted((item for item in items if item.name in alike), key=lambda item: (-item.bytes, item.name)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + item.bytes, rank))
    named = [(item.name, item.dtype, item.shape, item.name in alike) for item in items]
    text = json.dumps([named, sorted(aliases.items()), list(writers)])
    return SavePlan(
        layouts={rank: lay_out(share) for rank, share in sorted(shares.items()) if share},
        aliases=dict(aliases),
        alike=alike,
        signature=str(xxhash.xxh3_64_hexdigest(text.encode())),
    )
