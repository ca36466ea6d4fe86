"""The container of a shard: a plain safetensors file.

Eight bytes with the length of the header (little endian), the header in JSON, the tensors' bytes one after the other.
Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

# Bytes per element of each dtype, under the names that safetensors gives them.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Item:
    """One tensor to store: its name, dtype as safetensors calls it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size without padding."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Entry:
    """A tensor inside a shard file: it takes the bytes from `begin` to `end`, counted from the start of the file."""

    item: Item
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Where everything of one shard lies."""

    head: bytes
    entries: tuple[Entry, ...]
    size: int


class ShardDamaged(ValueError):
    """The header of a shard cannot be true."""


def lay_out(items: Iterable[Item], metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a file of these tensors, with `metadata` in its header.

    Wide elements come first, so that each tensor is aligned to its own element without gaps, which the format forbids.
    """
    offset = 0
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed = []
    for item in sorted(items, key=lambda item: (-ITEM_BYTES[item.dtype], item.name)):
        end = offset + item.bytes
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [offset, end]}
        placed.append((item, offset, end))
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    start = len(head)
    return Layout(head, tuple(Entry(item, start + a, start + b) for item, a, b in placed), start + offset)


def header_length(prefix: bytes | bytearray, file_bytes: int) -> int:
    """The length of the header, from the first 8 bytes of a file."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(file_bytes - 8, _MAX_HEADER):
        raise ShardDamaged("the header is longer than the file")
    return length


def read_header(text: bytes | bytearray, file_bytes: int) -> tuple[Entry, ...]:
    """The tensors of a shard in the order of their bytes; they must fill the file exactly."""
    try:
        header = json.loads(text)
        entries = [_entry(name, value, 8 + len(text)) for name, value in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ShardDamaged(f"the header is not readable: {error}") from error
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 8 + len(text)
    for entry in entries:
        if entry.begin != position or entry.end - entry.begin != entry.item.bytes:
            raise ShardDamaged(f"the place of tensor {entry.item.name} does not fit its shape")
        position = entry.end
    if position != file_bytes:
        raise ShardDamaged("the tensors do not fill the file")
    return tuple(entries)


def _entry(name: str, value: dict[str, object], start: int) -> Entry:
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(dtype, str) and dtype in ITEM_BYTES):
        raise ValueError(f"dtype {dtype!r} of {name}")
    begin, end = whole_numbers(offsets)
    return Entry(Item(name, dtype, whole_numbers(shape)), start + begin, start + end)


def whole_numbers(value: object) -> tuple[int, ...]:
    """A JSON list of integers that are not negative, as a tuple; `ValueError` for anything else."""
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"not a list of sizes: {value!r}")
    return tuple(value)
