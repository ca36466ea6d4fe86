"""The ways to start a run: sbatch and submitit behind one small interface (ways.py), local, manual; and to resume one.

From Python: `submit`, which returns a `RunHandle`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster_ddp.submit.handle import RunFailed as RunFailed
    from cluster_ddp.submit.handle import RunHandle as RunHandle
    from cluster_ddp.submit.handle import submit as submit

_PUBLIC = ("submit", "RunHandle", "RunFailed")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module("cluster_ddp.submit.handle"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
