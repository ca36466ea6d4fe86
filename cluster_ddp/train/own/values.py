"""Whether tensors have changed, by a few of their elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cluster_ddp.train.data.fingerprint import fingerprint

_SAMPLE = 64  # elements of a tensor that are looked at


def has_values(tensor: Tensor) -> bool:
    """Whether it has elements that can be read."""
    return not (tensor.is_meta or tensor.is_nested) and tensor.layout is torch.strided and tensor.numel() > 0


def sampled(tensors: Iterable[Tensor]) -> int:
    """A fingerprint of some elements of each."""
    return fingerprint([tensor.detach().reshape(-1)[:: -(-tensor.numel() // _SAMPLE)] for tensor in tensors])
