"""The buffer into which a rank copies its share of the state, allocated once and reused.

It is laid out like the shard file, header first, so that it can be written as it is.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.checkpoint.format import Layout
from cluster_ddp.checkpoint.plan import TORCH_DTYPES
from cluster_ddp.printing import say

_WIPE_ON_FORK = 18 if sys.platform == "linux" else None  # MADV_WIPEONFORK of madvise(2), not defined by mmap


class Staging:
    """Copies tensors into host memory.

    On CUDA the memory is pinned, and the copy runs on its own stream, alongside the forward and backward passes.
    """

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._views: dict[str, Tensor] = {}
        self._to_be_pinned = False
        self._unpin: weakref.finalize[[Tensor], Staging] | None = None  # set while the memory is pinned
        self._side: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, layout: Layout, pinned: bool) -> None:
        """Allocate memory for a shard; does nothing if the layout is that of the previous call."""
        if layout is self._layout:
            return
        if layout.size > len(self._flat) or pinned != self._to_be_pinned:
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
        """Copy the tensors of the layout; the copy of those in `overlapping` may continue until `wait_for_staging`.

        The rest is copied on the current stream, before anything launched later can change it.
        """
        if self._unpin is None:
            with torch.no_grad():  # one call halves the time for small tensors
                torch._foreach_copy_(list(self._views.values()), [tensors[name] for name in self._views])
            return
        on_side: list[str] = []
        here = torch.device("cuda", torch.cuda.current_device())
        for name, view in self._views.items():
            is_here = tensors[name].device == here
            if is_here and name in overlapping:
                on_side.append(name)
            else:  # the host waits for another GPU, which the event below does not cover
                view.copy_(tensors[name].detach(), non_blocking=is_here)
        self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for name in on_side:
                source = tensors[name].detach()
                self._views[name].copy_(source, non_blocking=True)
                source.record_stream(self._side)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait_for_staging(self) -> None:
        """Make GPU work launched from now on wait for the copy; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def shard(self) -> memoryview:
        """Wait for the copy, and return the bytes of the shard."""
        self._wait()
        size = self._layout.size if self._layout else 0
        return self._flat.numpy().data[:size]

    def copies(self) -> Mapping[str, Tensor]:
        """Wait for the copy, and return the tensors of the shard."""
        self._wait()
        return self._views

    def release(self) -> None:
        if self._unpin is not None:
            self._wait()
            self._unpin()
            self._unpin = None
        self._layout, self._views, self._copied = None, {}, None
        self._flat = torch.empty(0, dtype=torch.uint8)

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _allocate(self, size: int, pinned: bool) -> None:
        self.release()  # first, so that two buffers never coexist
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        memory = mmap.mmap(-1, size, **private)
        # Large pages make the first copy several times faster. Data loading workers are forked from this process, and a
        # save would then have to copy every page shared with them, so theirs are wiped. (With MADV_DONTFORK they would
        # have no pages there: a worker that frees this object would unmap whatever has been mapped there since.)
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
            with contextlib.suppress(AttributeError, OSError):  # a hint, which not every system and kernel supports
                if advice is not None:
                    memory.madvise(advice)
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._flat.zero_()  # so that pages are allocated here rather than during the first copy
        self._to_be_pinned = pinned
        if pinned and _pin(self._flat):
            # Even if `release` is never called: the driver must not keep memory registered that the system reuses.
            self._unpin = weakref.finalize(self, _unpin, self._flat)
            self._unpin.atexit = False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pin(memory: Tensor) -> bool:
    """Register memory with the driver; torch's own pinned memory is rounded up to a power of two."""
    try:
        status = int(_cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0))
        problem = f"cudaError {status}" if status else None
    except RuntimeError as error:
        problem = str(error)
    if problem is not None:
        say(
            f"cluster-ddp: the memory for checkpoints cannot be pinned: {problem}\n"
            "    saving works without it, and blocks training for longer"
        )
    return problem is None


def _unpin(memory: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # the driver may have shut down already
        _cudart().cudaHostUnregister(memory.data_ptr())
