"""Recognizes tables that depend only on positions, such as a causal mask that a model makes in its first forward pass.

A resume makes them again when it needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_FEWEST = 4  # rows and columns of a mask
_FEWEST_ROWS = 6  # of a table whose rows follow from each other
_TOLERANCE = 0.02  # relative to the largest element: tables may be in bfloat16


def without_tables(changed: Iterable[str], before: Mapping[str, Any], leaves: Mapping[str, Any]) -> list[str]:
    """The changed names that are neither such a table now nor, beside one, the number of its rows.

    A table that had as many positions before, but other values, depends on something else as well.
    """
    changed = list(changed)
    tables = {
        name
        for name in changed
        if isinstance(leaf := leaves.get(name), Tensor) and is_table(leaf) and not _is_alike(before.get(name), leaf)
    }
    sizes = {(owner, size) for name in tables for owner in _owners(name) for size in leaves[name].shape}
    rows = {name for name in changed if type(leaves.get(name)) is int and (_owner(name), leaves[name]) in sizes}
    return [name for name in changed if name not in tables | rows]


def _is_alike(before: Any, tensor: Tensor) -> bool:
    if not isinstance(before, Tensor) or before.is_nested:  # which has no shape
        return False
    return (before.shape, before.dtype) == (tensor.shape, tensor.dtype)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _owners(name: str) -> set[str]:
    """What holds a table, and what holds the dict or list that it is in, such as one by device."""
    return {_owner(name), _owner(_owner(name))}


def is_table(tensor: Tensor) -> bool:
    """Whether a tensor depends only on positions."""
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        return False
    if tensor.numel() < _FEWEST:
        return False
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return _depends_on_distance(tensor) or any(_follows(tensor.movedim(at, 0)) for at in range(tensor.dim()))


def _depends_on_distance(tensor: Tensor) -> bool:
    """Whether an element depends only on the difference between row and column, as in a causal mask or in ALiBi."""
    if tensor.dim() < 2 or min(tensor.shape[-2:]) < _FEWEST:
        return False
    is_constant = torch.equal(tensor, tensor[..., :1, :1].expand_as(tensor))
    return not is_constant and torch.equal(tensor[..., 1:, 1:], tensor[..., :-1, :-1])


def _follows(rows: Tensor) -> bool:
    """Whether each row follows from the two before as in an angle or an index that grows from 0, element by element.

    cos((n + 1) w) + cos((n - 1) w) = 2 cos(w) cos(n w) holds for sines as well, and n + 1 + n - 1 = 2 n.
    """
    if len(rows) < _FEWEST_ROWS or rows.dtype is torch.bool or torch.equal(rows, rows[:1].expand_as(rows)):
        return False
    precision = torch.finfo(rows.dtype).eps if rows.dtype.is_floating_point or rows.is_complex() else 0.0
    rows = (torch.view_as_real(rows) if rows.is_complex() else rows).double()
    if not bool(((rows[0] == 0) | (rows[0] == 1)).all()):
        return False
    middle, around = rows[1:-1], rows[2:] + rows[:-2]
    factor = (middle * around).sum(0) / middle.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    largest = rows.abs().max()
    return bool((around - factor * middle).abs().max() <= _TOLERANCE * largest) and (
        bool((around - 2 * middle).abs().max() > _TOLERANCE * largest) or _has_whole_step(rows, precision)
    )


def _has_whole_step(rows: Tensor, precision: float) -> bool:
    """Whether rows that grow evenly do so by a whole number, or by its inverse, and not up to what a batch has given.

    One column suffices: a table of angles has other frequencies besides.
    """
    steps = ((rows[-1] - rows[0]) / (len(rows) - 1)).abs()
    steps = steps[steps > 0]
    whole = torch.maximum(steps, 1 / steps)
    return bool(((whole - whole.round()).abs() <= 4 * precision * whole).any())
