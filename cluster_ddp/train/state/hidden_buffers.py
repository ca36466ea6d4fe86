"""Saves what a model's state_dict() omits, as soon as it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.contents import contents
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.state.position_tables import is_table


class HiddenBuffers:
    """What state_dict() omits, as it was when this was made: buffers that are not persistent, or what it leaves out.

    This includes buffers that are registered later, such as in the first forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        saved = model.state_dict(keep_vars=True)
        ids = set(map(id, saved.values()))  # under any names; a copy under the right name is refused elsewhere
        self._omitted = [
            (name, module, key)
            for prefix, module in self._modules
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and (name := _join(prefix, key)) not in saved and id(tensor) not in ids
        ]
        self._first = self._now()
        self._versions = {name: tensor._version for name, tensor in self._first.items() if tensor is not None}
        self._contents = _contents_of(self._first)
        self._tables: dict[str, tuple[tuple[int, int, int | None], bool]] = {}

    def changed(self) -> dict[str, Tensor]:
        """Those that are no longer as they were, by name; also through ``.data``, which torch does not count."""
        now = self._now()
        before, found = self._contents, _contents_of(now)
        changed = {
            name: tensor
            for name, tensor in now.items()
            if tensor is not self._first.get(name)
            or (tensor is not None and tensor._version != self._versions[name])
            or before.get(name) != found.get(name)
        }
        for name, first in self._first.items():
            if first is not None and now.get(name) is None:
                raise TaskError(
                    f"{name} of the model is None or deleted now, but was a tensor when training began, and would be "
                    "a tensor again after a resume: start with None there, or clear the tensor in place (zero_())"
                )
        for name, tensor in changed.items():
            if tensor is not None and tensor.layout is not torch.strided:
                raise TaskError(
                    f"{name} of the model is sparse and not as it was when training began; no checkpoint can contain "
                    "that: hold its indices and values as buffers of their own"
                )
        if find_world().world_size == 1:
            return changed
        # Each rank makes masks and tables of positions for as many as it has met.
        return {
            name: tensor
            for name, tensor in changed.items()
            if self._first.get(name) is not None or not self._is_table(name, tensor, found.get(name))
        }

    def _is_table(self, name: str, tensor: Tensor, digest: int | None) -> bool:
        """Whether it is a table of positions, which is found out again only once it has changed."""
        mark = id(tensor), 0 if tensor.is_inference() else tensor._version, digest
        if self._tables.get(name, (None, False))[0] != mark:
            self._tables[name] = mark, is_table(tensor)
        return self._tables[name][1]

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Put back what `changed` returned; tensors of another form go to this device."""
        modules = dict(self._modules)
        for name, tensor in tensors.items():
            prefix, _, key = name.rpartition(".")
            there = getattr(modules[prefix], key, None)
            if isinstance(there, Tensor) and _form_of(there) == _form_of(tensor):
                there.detach().copy_(tensor)
            elif name in self._first:
                setattr(modules[prefix], key, tensor.to(device))
            else:
                modules[prefix].register_buffer(key, tensor.to(device), persistent=False)

    def _now(self) -> dict[str, Any]:
        now = {name: getattr(module, key, None) for name, module, key in self._omitted}
        for prefix, module in self._modules:
            for key in module._buffers if module._non_persistent_buffers_set else ():
                if key in module._non_persistent_buffers_set:
                    now[_join(prefix, key)] = module._buffers[key]
        return now


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}".removeprefix(".")


def _contents_of(buffers: Mapping[str, Tensor | None]) -> dict[str, int]:
    return contents((name, buffer) for name, buffer in buffers.items() if buffer is not None)
