"""Assigns each tensor to one of the writing ranks, with the same result on every rank."""

from __future__ import annotations

import functools
import heapq
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from cluster_ddp.checkpoint.errors import CheckpointError
from cluster_ddp.checkpoint.format import Item, Layout, StoredTensor, lay_out, shard_name

_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
# By safetensors' name; only the dtypes that this torch has.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _DTYPE_NAMES.items() if hasattr(torch, name)
}
_OF_MODEL = ("model.", "ema.")  # prefixes of what may belong to a parameter that is trained
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class SavePlan:
    """The shards of a save and who writes them."""

    layouts: dict[int, Layout]  # the layout of each writing rank's shard; none for ranks with nothing to write
    aliases: dict[str, str]  # names of tensors that share memory with another, and that other's name
    # Names of tensors that are the same on all ranks; they change only in the optimizer's step
    replicated: frozenset[str]
    signature: str  # equal on two ranks exactly when they made the same plan

    @functools.cached_property
    def replicated_names(self) -> tuple[str, ...]:
        """The names in `replicated`, in the same order on all ranks."""
        return tuple(sorted(self.replicated))

    @functools.cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Where each tensor is stored, as the manifest says it."""
        return {
            entry.item.name: StoredTensor(shard_name(rank), entry.item.dtype, entry.item.shape)
            for rank, layout in self.layouts.items()
            for entry in layout.entries
        }


def as_json(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars as they will be read back; raises `CheckpointError` if JSON cannot hold one of them."""
    plain: dict[str, Any] = {}
    for name, value in scalars.items():
        try:
            plain[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state {name!r} cannot be saved, JSON cannot hold it: {error}") from error
    return plain


def describe(tensors: Mapping[str, Tensor]) -> tuple[tuple[Item, ...], dict[str, str], frozenset[str]]:
    """What is to be stored, the aliases, and the names whose values are the same on all ranks.

    Only what the optimizer trains (an `nn.Parameter` here), its average and its optimizer state are known to be the
    same everywhere. Buffers are not: BatchNorm's running statistics differ between ranks, and rank 0's are stored. Nor
    is what a task keeps, such as a teacher whose parameters have the names of the model's: loss() may change it while
    a save is under way.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise CheckpointError(f"tensor {name} is {kind}, and a checkpoint holds only dense ones{_instead(name)}")
    items, aliases = [], find_aliases(tensors)
    for name in sorted(tensors.keys() - aliases.keys()):
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise CheckpointError(
                f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot hold: keep it in another dtype"
            )
        items.append(Item(name, _CODES[tensor.dtype], tuple(tensor.shape)))
    optimized = {
        name.removeprefix("optimizer.").rpartition(".")[0] for name in tensors if name.startswith("optimizer.")
    }
    replicated = frozenset(
        item.name
        for item in items
        if item.name.startswith("optimizer.")
        or isinstance(tensors[item.name], nn.Parameter)
        or (item.name.startswith(_OF_MODEL) and item.name.partition(".")[2] in optimized)
        or isinstance(tensors.get(f"model.{item.name.removeprefix('ema.')}"), nn.Parameter)
    )
    return tuple(items), aliases, replicated


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that share memory with another, each with that other's first name."""
    aliases, first = {}, dict[tuple[object, ...], str]()
    for name in sorted(tensors):
        memory = memory_of(tensors[name])
        if memory is not None and first.setdefault(memory, name) != name:
            aliases[name] = first[memory]
    return aliases


def find_overlaps(tensors: Mapping[str, Tensor]) -> set[tuple[str, str]]:
    """Pairs of names of tensors of which one lies in the memory of the other, such as a view of its first rows.

    Those that share memory as a whole are in `find_aliases`. Tensors with gaps are left out: the even and the odd
    numbers of one tensor lie between each other, and share nothing.
    """
    aliases = find_aliases(tensors)
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), -tensor.nbytes, name)
        for name, tensor in tensors.items()
        if name not in aliases and tensor.numel() > 0 and _is_dense(tensor)
    )
    pairs, place, end, widest = set[tuple[str, str]](), "", 0, ""
    for device, start, size, name in spans:
        if device == place and start < end:
            pairs.add((widest, name))
        if device != place or start - size > end:
            place, end, widest = device, start - size, name
    return pairs


def _is_dense(tensor: Tensor) -> bool:
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in sides) + 1 == tensor.numel()


def _instead(name: str) -> str:
    if not name.startswith("optimizer."):
        return ": keep it as one"
    return ": it follows from sparse gradients; use SparseAdam, SGD without momentum, or sparse=False for the embedding"


_LOOKS: dict[str, Callable[[Any], Any]] = {
    "type": type,
    "memory": Tensor.data_ptr,
    "stride": Tensor.stride,
    **{name: operator.attrgetter(name) for name in ("dtype", "shape", "device")},
}


class Tensors(dict[str, Tensor]):
    """Tensors by name at one moment, each inspected only once: for a small one that takes as long as copying it.

    Tensors may be added, but not removed or replaced.
    """

    def __init__(self, named: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(named or {})
        self._looks: dict[str, list[Any]] = {look: [] for look in _LOOKS}

    def looks(self) -> dict[str, list[Any]] | None:
        """Everything that the result of `describe` depends on, in the order of the tensors.

        None if a tensor, such as a sparse one, has no single memory address.
        """
        new = list(islice(self.values(), len(self._looks["type"]), None))
        try:
            found = {name: list(map(look, new)) for name, look in _LOOKS.items()}
        except RuntimeError:
            return None
        for name, column in self._looks.items():
            column += found[name]
        return self._looks


def memory_of(tensor: Tensor) -> tuple[object, ...] | None:
    """A key that is equal for two tensors that view the same memory in the same way; None for empty ones."""
    if tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def make_plan(
    items: Sequence[Item], aliases: Mapping[str, str], replicated: frozenset[str], writers: Sequence[int]
) -> SavePlan:
    """Divide the tensors among the writing ranks, balancing bytes: the largest first, each to the least loaded rank."""
    shares: dict[int, list[Item]] = {rank: [] for rank in writers}
    shares[0] = [item for item in items if item.name not in replicated]
    loads = [(sum(item.bytes for item in share), rank) for rank, share in shares.items()]
    heapq.heapify(loads)
    for item in sorted((item for item in items if item.name in replicated), key=lambda item: (-item.bytes, item.name)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + item.bytes, rank))
    named = [(item.name, item.dtype, item.shape, item.name in replicated) for item in items]
    text = json.dumps([named, sorted(aliases.items()), list(writers)])
    return SavePlan(
        layouts={rank: lay_out(share) for rank, share in sorted(shares.items()) if share},
        aliases=dict(aliases),
        replicated=replicated,
        signature=str(xxhash.xxh3_64_hexdigest(text.encode())),
    )
