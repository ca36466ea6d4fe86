"""Detects changes of tensor elements by digests: changes through ``.data`` or ``.numpy()`` leave no other trace."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import torch
from torch import Tensor

from cluster_ddp.checkpoint.replicas import tensor_digests, tensor_hash

_WHOLE = 1 << 20  # bytes up to which a tensor on the CPU is hashed as a whole
_SAMPLE = 4096  # number of elements of a larger one that are hashed


def contents(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """A digest of each tensor's elements, by name; for a large one on the CPU, of a sample of them.

    Tensors whose elements cannot be read in this way are omitted.
    """
    found: dict[str, int] = {}
    elsewhere: dict[torch.device, dict[str, Tensor]] = collections.defaultdict(dict)
    for name, tensor in tensors:
        if not _has_bits(tensor):
            continue
        if not tensor.is_cpu:
            elsewhere[tensor.device][name] = tensor
        elif tensor.nbytes <= _WHOLE:
            found[name] = tensor_hash(tensor)
        elif tensor.is_contiguous():
            found[name] = tensor_hash(tensor.detach().view(-1)[:: -(-tensor.numel() // _SAMPLE)])
    for there in elsewhere.values():  # a single result per device, for which the host waits
        found |= zip(there, tensor_digests(list(there.values())).tolist(), strict=True)
    return found


def _has_bits(tensor: Tensor) -> bool:
    return (
        # A derived class without a __torch_dispatch__ of its own has its elements as any other tensor has.
        type(tensor).__torch_dispatch__ == Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and tensor.numel() > 0
    )
