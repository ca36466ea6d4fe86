"""Detects a DDP communication hook that keeps state from step to step, as PowerSGD's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.inner_parts import inner_parts


class CommHooks:
    """Warns of hooks of `register_comm_hook` whose state contains a changing integer.

    Parameters
    ----------
    wrapped
        The models wrapped in DDP.
    warn
        Called with the message.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel], warn: Callable[[str], None]) -> None:
        self._wrapped, self._warn = wrapped, warn
        self._before: dict[str, dict[str, int]] = {}

    def first(self) -> None:
        """Call after the first step or backward pass."""
        self._before = dict(self._counts())

    def second(self) -> None:
        """Call after the second one."""
        if names := sorted(name for name, now in self._counts() if self._before.get(name, now) != now):
            self._warn(
                f"DDP sums the gradients by a communication hook that keeps a state ({', '.join(names)}), which no "
                "checkpoint contains: it starts over after a resume, which is not exact. Exact are hooks without, "
                "such as bf16_compress_hook, and no hook at all"
            )

    def _counts(self) -> Iterator[tuple[str, dict[str, int]]]:
        for model in self._wrapped:
            for _, state in model._comm_hooks:
                yield type(state).__name__, {name: value for name, value in inner_parts(state) if type(value) is int}
