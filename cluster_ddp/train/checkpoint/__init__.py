"""Checkpoints: written in the background by all ranks, verified when read, never half there.

Importing this package does not import torch; `Checkpointer` and `Restored` do when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster_ddp.train.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, Differences

if TYPE_CHECKING:
    from cluster_ddp.train.checkpoint.checkpointer import Checkpointer
    from cluster_ddp.train.checkpoint.reading import Restored

__all__ = [
    "Checkpointer",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "Differences",
    "Restored",
]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from cluster_ddp.train.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    if name == "Restored":
        from cluster_ddp.train.checkpoint.reading import Restored

        return Restored
    raise AttributeError(name)
