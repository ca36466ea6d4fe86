"""What runs on each rank: the trainer, and its parts for use in your own script.

The public names are listed in `cluster_ddp.train.public` and imported lazily: login nodes import this package without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.train.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "Task":  # task files import it, also on login nodes, which do not train
        return importlib.import_module("cluster_ddp.train.task").Task
    if not name.startswith("_"):
        public = importlib.import_module("cluster_ddp.train.public")
        if name in vars(public):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
