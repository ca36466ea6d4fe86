"""Checkpoints: written in the background by all ranks, verified when read, never half there.

Importing this package does not import torch; `Checkpointer` and `Restored` do when they are first used.
"""

from __future__ import annotations

import importlib
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


_HOMES = {"Checkpointer": "checkpointer", "Restored": "reading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
