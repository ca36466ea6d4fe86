"""The one buffer that a rank's share of the state is copied into, allocated once and reused.

The buffer is laid out as the shard file, header first, so that it can be written as it is.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.train.checkpoint.plan import TORCH_DTYPES
from cluster_ddp.train.checkpoint.shards import Layout


class Staging:
    """Copies tensors into host memory.

    On CUDA the memory is pinned and the copy runs on a stream of its own, beside the forward and backward passes.
    """

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._views: dict[str, Tensor] = {}
        self._pinned = False
        self._side: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, layout: Layout, pinned: bool) -> None:
        """Make room for a shard; does nothing when it is the layout of the time before."""
        if layout is self._layout:
            return
        if layout.size > len(self._flat) or pinned != self._pinned:
            self._allocate(layout.size, pinned)
        self._layout = layout
        self._flat[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        self._views = {
            entry.item.name: self._flat[entry.begin : entry.end]
            .view(TORCH_DTYPES[entry.item.dtype])
            .view(entry.item.shape)
            for entry in layout.entries
        }

    def copy(self, tensors: Mapping[str, Tensor], overlapping: frozenset[str]) -> None:
        """Copy the tensors of the layout; those named in `overlapping` may still be read until `wait_copied`.

        The rest is copied in the order of the current stream, before anything that is launched later changes it.
        """
        on_side: list[str] = []
        for name, view in self._views.items():
            if name in overlapping and tensors[name].is_cuda:
                on_side.append(name)
            else:
                view.copy_(tensors[name].detach(), non_blocking=self._pinned)
        if not self._pinned:
            return
        self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for name in on_side:
                source = tensors[name].detach()
                self._views[name].copy_(source, non_blocking=True)
                source.record_stream(self._side)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait_copied(self) -> None:
        """Let what is launched from here on wait for the copy, on the GPU; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def shard(self) -> memoryview:
        """The bytes of the shard, once the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()
        size = self._layout.size if self._layout else 0
        return self._flat.numpy().data[:size]

    def release(self) -> None:
        """Give the memory back."""
        self._unpin()
        self._layout, self._views, self._copied = None, {}, None
        self._flat = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, size: int, pinned: bool) -> None:
        self.release()  # first, so that there are never two buffers
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        memory = mmap.mmap(-1, size, **private)
        # Large pages make the first copy several times faster. Data loading workers are forked from this process:
        # without DONTFORK every save after that would copy the pages they share.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                _advise(memory, getattr(mmap, advice))
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._flat.zero_()  # here the system finds the memory, rather than during the first copy
        self._pinned = pinned
        if pinned:
            # Registered rather than allocated pinned: torch's pinned allocator rounds up to a power of two.
            _check(int(_cudart().cudaHostRegister(self._flat.data_ptr(), size, 0)))

    def _unpin(self) -> None:
        if self._pinned and len(self._flat):
            if self._copied is not None:
                self._copied.synchronize()
            _check(int(_cudart().cudaHostUnregister(self._flat.data_ptr())))
        self._pinned = False


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        return  # advice only: kernels without large pages refuse it


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA could not pin the memory for checkpoints (cudaError {status})")
