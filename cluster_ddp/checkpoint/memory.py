"""A whole checkpoint in memory, with which a training checks early that its state can be restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.checkpoint.errors import CheckpointError, CheckpointMismatch
from cluster_ddp.checkpoint.format import Manifest
from cluster_ddp.checkpoint.plan import SavePlan
from cluster_ddp.checkpoint.restore import Check, Restored, match

_PLACE = "in memory"


class MemoryCheckpoint:
    """What a save with this plan would write (see `Checkpointer.save`), with tensors as read back from a file."""

    def __init__(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], plan: SavePlan) -> None:
        self._stored = {name: _read(tensors[name]) for name in plan.stored}
        self._manifest = Manifest(
            run_id="", step=0, samples=0, epoch=0, world_size=1, created=0.0, job_digest="", versions={}, shards={},
            tensors=plan.stored, scalars=json.loads(json.dumps(scalars)), aliases=plan.aliases, metrics={},
        )  # fmt: skip

    def restore(self, tensors: Mapping[str, Tensor], check: Check) -> Restored:
        """Fill live tensors and raise as `Checkpointer.restore` does. Call it only once: `extra` is not copied."""
        check(self._manifest.scalars, self._manifest.stored())
        source_of, differences = match(self._manifest, tensors)
        if differences:
            raise CheckpointMismatch(_PLACE, differences)
        for name, stored in source_of.items():
            try:
                tensors[name].detach().copy_(self._stored[stored])
            except RuntimeError as error:
                raise CheckpointError(f"tensor {name} cannot be filled: {error}") from error
        extra = {name: stored for name, stored in self._manifest.names().items() if name not in tensors}
        return Restored(self._manifest, {name: self._stored[stored] for name, stored in extra.items()})


def _read(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
