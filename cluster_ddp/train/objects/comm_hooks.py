"""Detects a DDP communication hook that keeps state from step to step, as PowerSGD's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.objects.inner_parts import CONTAINERS, inner_parts
from cluster_ddp.train.objects.kinds import is_of_library


def watch_comm_hooks(wrapped: Sequence[DistributedDataParallel], warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step or backward pass, of hooks whose state contains an integer that it changes.

    Parameters
    ----------
    wrapped
        The models wrapped in DDP.
    warn
        Called with the message.
    """
    before = dict(_counts(wrapped))
    yield
    if names := sorted(name for name, now in _counts(wrapped) if before.get(name, now) != now):
        warn(
            f"DDP sums the gradients with a communication hook that keeps a state ({', '.join(names)}), which no "
            "checkpoint contains: it starts over after a resume, which is not exact. Use none, "
            "or one without a state, such as bf16_compress_hook: these are exact"
        )


def states_of_hooks(model: DistributedDataParallel) -> list[object]:
    """What the communication hooks of a model may keep something in; of an object of torch's, its parts."""
    states = [state for _, state in model._comm_hooks]
    are_seen = [isinstance(state, CONTAINERS) or not is_of_library(state) for state in states]
    return [state if is_seen else dict(inner_parts(state)) for state, is_seen in zip(states, are_seen, strict=True)]


def _counts(wrapped: Sequence[DistributedDataParallel]) -> Iterator[tuple[str, dict[str, int]]]:
    for model in wrapped:
        for _, state in model._comm_hooks:
            yield type(state).__name__, {name: value for name, value in inner_parts(state) if type(value) is int}
