"""Digests of tensors, by which ranks check that they hold the same ones without sending them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 1 << 24  # elements summed at once: torch first widens them to 64 bits, in memory of its own


def tensor_digests(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor, equal on two ranks if all bits are; int64, shape (n,), on the tensors' device.

    On the CPU this is a hash; on a device, the sum of the bits as integers, which takes one pass and little memory, and
    does not depend on the order of summation. If some tensors are on a device and some on the CPU, such as the step
    counts of many optimizers, all numbers are on the device; with several devices, on the first tensor's. The host does
    not wait for the device.
    """
    on_host = torch.tensor([tensor_hash(tensor) for tensor in tensors if tensor.is_cpu], dtype=torch.int64)
    if len(on_host) == len(tensors):
        return on_host
    device = next(tensor.device for tensor in tensors if not tensor.is_cpu)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    sent = iter(on_host.to(device, non_blocking=True))
    return torch.stack([next(sent) if tensor.is_cpu else sum_of(tensor).to(device) for tensor in tensors])


def tensor_hash(tensor: Tensor) -> int:
    """A signed 64-bit hash of all bits of a CPU tensor."""
    flat = _plain(tensor).contiguous().reshape(-1)
    return int(xxhash.xxh3_64_intdigest(flat.view(INTEGERS[flat.element_size()]).numpy().data)) - (1 << 63)


def sum_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements as integers of 64 bits, on its device, computed in pieces if it is large."""
    numbers = _numbers(tensor)
    if numbers.numel() <= PIECE or not numbers.is_contiguous():
        return numbers.sum(dtype=torch.int64)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in torch.split(numbers.view(-1), PIECE)]).sum()


def sum_on_host(tensor: Tensor) -> int:
    """The same of a CPU tensor: in a tenth of the processors' time that torch would take from the training."""
    return int(_numbers(tensor).numpy().sum(dtype=np.int64))


def _numbers(tensor: Tensor) -> Tensor:
    plain = _plain(tensor)
    return plain.view(INTEGERS[plain.element_size()])


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class ReplicaDigest:
    """A digest of the tensors that must be the same on all ranks.

    On the CPU, `compute` does it in the background, and the tensors must not change before that; on a device, the
    computation is queued there on construction.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._tensors = list(tensors.values())
        self._digests = torch.empty(0, dtype=torch.int64)
        self._computed = threading.Event()
        self._arrived: torch.cuda.Event | None = None
        self._on_device = {name for name, tensor in tensors.items() if tensor.is_cuda}
        if self._on_device:
            digests = tensor_digests(self._tensors)
            self._digests = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=True)
            self._digests.copy_(digests, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(digests.device))
            self._tensors = []
            self._computed.set()

    def compute(self) -> None:
        """Compute the digest, unless that has been done."""
        try:
            if not self._computed.is_set():
                self._digests = tensor_digests(self._tensors)
                self._tensors = []
        finally:
            self._computed.set()

    def wait(self) -> None:
        """Wait until the tensors may change."""
        self._computed.wait()

    def other_copies(self, copies: Mapping[str, Tensor]) -> list[str]:
        """Names of copies on the CPU that are not what the tensors on the device were; waits for the device."""
        if self._arrived is None:
            return []
        self._arrived.synchronize()
        digests = dict(zip(self._names, self._digests.tolist(), strict=True))
        return [name for name, copy in copies.items() if name in self._on_device and sum_on_host(copy) != digests[name]]

    def by_kind(self) -> dict[str, str]:
        """One digest for each kind of tensor (the first part of its name); waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        kinds = [name.partition(".")[0] for name in self._names]
        hashed = {kind: xxhash.xxh3_128() for kind in sorted(set(kinds))}
        for kind, value in zip(kinds, self._digests.tolist(), strict=True):
            hashed[kind].update(value.to_bytes(8, "little", signed=True))
        return {kind: digest.hexdigest() for kind, digest in hashed.items()}
