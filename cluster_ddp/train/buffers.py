"""Restores a model's buffers after a skipped update: BatchNorm's statistics already change in the forward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster_ddp.checkpoint.replicas import INTEGERS

_SENT_TOGETHER = 250 * 2**20  # bytes, as DDP sends them


class Buffers:
    """Broadcasts rank 0's buffers before each step, copies them, and restores the copies if the update is skipped."""

    def __init__(self, model: nn.Module) -> None:
        # Where each buffer is registered: a module may replace the tensor there at any time.
        # Not sparse ones: no checkpoint contains them, and a training that changes them is refused.
        self._slots = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is None or buffer.layout is torch.strided
        ]
        self._first = [(slot, name) for slot, name in self._slots if slot[name] is not None]
        self._kept: list[Tensor | None] = []
        self._places: list[tuple[int, int] | None] = []
        self._held: list[Tensor] = []  # their memory: a program may give them another by ``.data``
        self._live: list[Tensor] = []
        self._copies: list[Tensor] = []

    def send(self) -> None:
        """Broadcast rank 0's buffers; all ranks call it before a step, and before an evaluation.

        DDP would broadcast them in its forward pass. Anything that a loss computes before that, such as with a teacher
        inside the model, would use each rank's own buffers, and after a resume those of rank 0, the only ones saved.
        """
        if (group := dist.group.WORLD) is None:
            return
        # Not those that were None at first: they need not be there on all ranks. A shared one is sent once.
        found = {id(buffer): buffer for slot, name in self._first if (buffer := slot.get(name)) is not None}
        if found:
            with torch.no_grad():  # one at a time, ResNet-50's take 50 ms on two ranks, not 1.5
                dist._broadcast_coalesced(group, list(found.values()), _SENT_TOGETHER, 0)  # type: ignore[attr-defined]

    def keep(self) -> None:
        """Copy the buffers; call before the first forward pass of a step."""
        if not self._slots:
            return
        found = self._find()
        if (places := _places_of(found)) != self._places:
            self._kept, self._places = found, places
            self._held = [buffer.detach() for buffer in found if buffer is not None]
            self._live = [written_once(buffer) for buffer in self._held]
            self._copies = [buffer.clone() for buffer in self._live]
        elif self._copies:  # those of InstanceNorm are None
            torch._foreach_copy_(self._copies, self._live)

    def put_back(self, was_skipped: bool | Tensor) -> None:
        """Call after the update with the result of `Update.step`; the host does not wait for a result on the device."""
        if was_skipped is False or not self._slots:
            return
        replaced = _places_of(self._find()) != self._places
        if isinstance(was_skipped, Tensor) and not replaced:
            self._select(was_skipped.reshape(()) != 0)
        elif bool(was_skipped):
            for (slot, name), kept in zip(self._slots, self._kept, strict=True):
                slot[name] = kept
            if replaced:
                kept_buffers = (buffer for buffer in self._kept if buffer is not None)
                for buffer, held in zip(kept_buffers, self._held, strict=True):
                    buffer.data = held
            if self._copies:
                torch._foreach_copy_(self._live, self._copies)

    def _find(self) -> list[Tensor | None]:
        return [slot.get(name) for slot, name in self._slots]

    def _select(self, was_skipped: Tensor) -> None:
        """Restore the copies bit by bit if the update was skipped: integers wrap, so adding a difference is exact."""
        by_kind: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for live, copy in zip(self._live, self._copies, strict=True):
            parts = [torch.view_as_real(part) if part.is_complex() else part for part in (live, copy)]
            kind = INTEGERS[parts[0].element_size()]
            lives, copies = by_kind.setdefault(kind, ([], []))
            lives.append(parts[0].view(kind))
            copies.append(parts[1].view(kind))
        for kind, (lives, copies) in by_kind.items():
            change = torch._foreach_sub(copies, lives)
            torch._foreach_mul_(change, was_skipped.to(kind))
            torch._foreach_add_(lives, change)


def _places_of(buffers: list[Tensor | None]) -> list[tuple[int, int] | None]:
    """What differs once a buffer is another tensor, or has other memory."""
    return [None if buffer is None else (id(buffer), buffer.data_ptr()) for buffer in buffers]


def written_once(buffer: Tensor) -> Tensor:
    """A view in which every element has its own memory and can be written, unlike in an expanded buffer."""
    for dimension, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dimension] > 1:
            buffer = buffer.narrow(dimension, 0, 1)
    return buffer
