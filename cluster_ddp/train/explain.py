"""Errors of torch in the words of the job file."""

from __future__ import annotations

import torch

from cluster_ddp.spec import ClusterDDPError

_UNUSED = ("Expected to have finished reduction", "did not receive grad")


def explain(error: BaseException) -> str:
    """What went wrong and, where it is known, the setting to change."""
    text = str(error) or type(error).__name__
    if isinstance(error, ClusterDDPError):
        return text
    named = f"{type(error).__name__}: {text}"
    advice = _advice(error, text)
    return f"{advice}\n    ({named})" if advice else named


def _advice(error: BaseException, text: str) -> str | None:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return (
            "a batch does not fit in memory: lower train.batch_size (with train.global_batch the accumulation adapts), "
            "or set train.grad_checkpointing or a lower train.precision"
        )
    if any(sign in text for sign in _UNUSED):
        return (
            "some parameters take no part in the loss: set train.find_unused_parameters: true, or give them "
            "requires_grad=False"
        )
    return None
