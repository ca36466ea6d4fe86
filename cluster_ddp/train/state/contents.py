"""Whether the elements of tensors have changed: what is done by ``.data`` or ``.numpy()`` leaves no other trace."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cluster_ddp.checkpoint.replicas import tensor_digests, tensor_hash

_WHOLE = 1 << 20  # bytes of a tensor on the CPU that is looked at as a whole
_SAMPLE = 4096  # elements of a larger one


def contents(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """A digest of the elements of each tensor, by its name; of a large one on the CPU that of a sample of them.

    Tensors whose elements cannot be read so are left out.
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
    for there in elsewhere.values():  # one answer for all, which the host waits for
        found |= zip(there, tensor_digests(list(there.values())).tolist(), strict=True)
    return found


def _has_bits(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and tensor.numel() > 0
    )
