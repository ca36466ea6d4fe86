"""What wrappers of torch, Accelerate and Lightning's Fabric contain."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_FABRIC = ("lightning", "lightning_fabric")


def _inner(thing: Any) -> Any:
    """What a wrapper of torch, Accelerate or Lightning's Fabric contains; None if `thing` is not a wrapper."""
    library = type(thing).__module__.partition(".")[0]
    if isinstance(thing, DistributedDataParallel):
        return thing.module
    if isinstance(thing, nn.Module):
        name = "_forward_module" if library in _FABRIC else "_orig_mod"  # torch.compile
        return thing._modules.get(name)
    if library in _FABRIC:
        return getattr(thing, "_optimizer", None) if isinstance(thing, Optimizer) else None
    if library == "accelerate":
        return getattr(thing, "optimizer" if isinstance(thing, Optimizer) else "scheduler", None)
    return None


def bare_of(thing: Any) -> Any:
    """Return what is inside all wrappers."""
    while (inner := _inner(thing)) is not None:
        thing = inner
    return thing


def ddp_of(thing: Any) -> DistributedDataParallel | None:
    """Return the DDP among the wrappers; None if there is none."""
    while thing is not None and not isinstance(thing, DistributedDataParallel):
        thing = _inner(thing)
    return thing
