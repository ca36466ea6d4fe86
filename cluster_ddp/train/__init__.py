"""What runs on a rank: the trainer, and each part of it for use in one's own script.

The public names stand in `cluster_ddp.train.public`. They are loaded when first asked for: login nodes import this
package, and do without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.train.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "Task":  # what a file with a task asks for, also on login nodes, where nothing is trained
        return importlib.import_module("cluster_ddp.train.task").Task
    if not name.startswith("_"):
        public = importlib.import_module("cluster_ddp.train.public")
        if name in vars(public):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
