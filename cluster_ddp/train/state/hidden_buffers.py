"""Saves the buffers of a model that its state_dict() omits, as soon as they change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class HiddenBuffers:
    """The non-persistent buffers of a model, as they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        # Where each is registered, and its tensor and version.
        self._buffers: dict[str, tuple[nn.Module, str, Tensor | None, int]] = {
            f"{prefix}.{key}" if prefix else key: (module, key, buffer, -1 if buffer is None else buffer._version)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if key in module._non_persistent_buffers_set
        }

    def changed(self) -> dict[str, Tensor]:
        """Those that are no longer as they were, by name."""
        found = {}
        for name, (module, key, before, version) in self._buffers.items():
            now = getattr(module, key)
            if now is not before or (now is not None and now._version != version):
                found[name] = now
        return found

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Put back what `changed` returned; tensors of another shape go to this device."""
        for name, tensor in tensors.items():
            module, key, *_ = self._buffers[name]
            there = getattr(module, key)
            if there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype):
                there.copy_(tensor)
            else:
                setattr(module, key, tensor.to(device))
