"""Saves what a model's state_dict() omits, as soon as it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cluster_ddp.train.state.contents import contents


class HiddenBuffers:
    """What state_dict() omits, as it was when this was made: buffers that are not persistent, or what it leaves out."""

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        ids = set(map(id, saved.values()))  # under any names; a copy under the right name is refused elsewhere
        # Where each is registered, and its tensor and version.
        self._buffers: dict[str, tuple[nn.Module, str, Tensor | None, int]] = {}
        for prefix, module in model.named_modules():
            for key, buffer in (*module._parameters.items(), *module._buffers.items()):
                name = f"{prefix}.{key}".removeprefix(".")
                is_omitted = buffer is not None and name not in saved and id(buffer) not in ids
                if is_omitted or key in module._non_persistent_buffers_set:
                    self._buffers[name] = module, key, buffer, -1 if buffer is None else buffer._version
        self._contents = _contents_of(self._now())

    def changed(self) -> dict[str, Tensor]:
        """Those that are no longer as they were, by name; also through ``.data``, which torch does not count."""
        now = self._now()
        before, found = self._contents, _contents_of(now)
        return {
            name: now[name]
            for name, (_, _, first, version) in self._buffers.items()
            if now[name] is not first
            or (first is not None and first._version != version)
            or before.get(name) != found.get(name)
        }

    def _now(self) -> dict[str, Any]:
        return {name: getattr(module, key) for name, (module, key, *_) in self._buffers.items()}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Put back what `changed` returned; tensors of another shape go to this device."""
        for name, tensor in tensors.items():
            module, key, *_ = self._buffers[name]
            there = getattr(module, key)
            if there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype):
                there.detach().copy_(tensor)
            else:
                setattr(module, key, tensor.to(device))


def _contents_of(buffers: Mapping[str, Tensor | None]) -> dict[str, int]:
    return contents((name, buffer) for name, buffer in buffers.items() if buffer is not None)
