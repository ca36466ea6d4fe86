"""A whole checkpoint in memory, by which a training finds out early whether its state would come back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cluster_ddp.checkpoint.errors import CheckpointError, CheckpointMismatch
from cluster_ddp.checkpoint.format import Manifest, StoredTensor, header_length, read_header, shard_name
from cluster_ddp.checkpoint.plan import TORCH_DTYPES, describe, make_plan
from cluster_ddp.checkpoint.restore import Restored, match
from cluster_ddp.checkpoint.staging import Staging

_PLACE = "in memory"


class MemoryCheckpoint:
    """What one rank would write if it wrote all (see `Checkpointer.save`): the shard's bytes and the manifest."""

    def __init__(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        plan = make_plan(*describe(tensors), [0])
        self._staging = Staging()
        self._stored: dict[str, Tensor] = {}
        if 0 in plan.layouts:
            self._staging.prepare(plan.layouts[0], pinned=False)
            self._staging.copy(tensors, frozenset())
            self._stored = _tensors_in(self._staging.shard())
        self._manifest = Manifest(
            run_id="", step=0, samples=0, epoch=0, world_size=1, created=0.0, job_digest="", versions={}, shards={},
            tensors={
                entry.item.name: StoredTensor(shard_name(0), entry.item.dtype, entry.item.shape)
                for layout in plan.layouts.values()
                for entry in layout.entries
            },
            scalars=json.loads(json.dumps(scalars)),
            aliases=plan.aliases,
            metrics={},
        )  # fmt: skip

    def restore(self, tensors: Mapping[str, Tensor]) -> Restored:
        """Fill live tensors as `Checkpointer.restore` does, with its errors."""
        source_of, differences = match(self._manifest, tensors)
        if differences:
            raise CheckpointMismatch(_PLACE, differences)
        for name, stored in source_of.items():
            try:
                tensors[name].detach().copy_(self._stored[stored])
            except RuntimeError as error:
                raise CheckpointError(f"tensor {name} cannot be filled: {error}") from error
        extra = {name: stored for name, stored in self._manifest.names().items() if name not in tensors}
        made = {stored: self._stored[stored].clone() for stored in extra.values()}
        return Restored(self._manifest, {name: made[stored] for name, stored in extra.items()})


def _tensors_in(shard: memoryview) -> dict[str, Tensor]:
    head = 8 + header_length(bytes(shard[:8]), len(shard))
    flat = torch.frombuffer(shard, dtype=torch.uint8)
    return {
        entry.item.name: flat[entry.begin : entry.end].view(TORCH_DTYPES[entry.item.dtype]).view(entry.item.shape)
        for entry in read_header(bytes(shard[8:head]), len(shard))
    }
