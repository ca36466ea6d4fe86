"""Detects buffers that differ between ranks, of which a checkpoint contains only rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from cluster_ddp.train.distributed import all_gather_object
from cluster_ddp.train.own.values import has_values, sampled

_SHOWN = 5  # names in the message
_OF_RANK_0 = (
    "A checkpoint contains those of rank 0, and a resume gives them to all ranks: it is exact only if nothing, such as "
)


class RankBuffers:
    """Warns, after the second step, about buffers that differ between the ranks although the steps may use them.

    Those of a model in DDP differ if no forward pass broadcasts them: with ``broadcast_buffers=False``, or if every
    forward pass runs without gradient synchronization, as in Lightning's manual optimization. Nothing broadcasts those
    of a model outside DDP, such as a mean teacher's; they matter if it runs in the steps, and not only in evaluations.

    Parameters
    ----------
    wrapped
        The models wrapped in DDP.
    others
        What else is passed in, by name; modules among it are outside DDP.
    warn
        Called with the message.
    """

    def __init__(
        self, wrapped: Sequence[DistributedDataParallel], others: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._wrapped, self._warn = wrapped, warn
        self._outside = {name: other for name, other in others.items() if wrapped and isinstance(other, nn.Module)}
        self._running: set[str] = set()
        self._hooks: list[RemovableHandle] = []

    def first(self) -> None:
        """Call after the first step: until the second, see which modules outside DDP run."""
        self._hooks = [_on_forward(module, name, self._running) for name, module in self._outside.items()]

    def second(self) -> None:
        """Call after the second step, on all ranks."""
        for hook in self._hooks:
            hook.remove()
        if not self._wrapped:
            return
        own = {(f"{at}", name): mark for at, model in enumerate(self._wrapped) for name, mark in _own_of(model)}
        outside = {
            (name, f"{name}.{of}"): mark for name in self._running for of, mark in _fingerprints(self._outside[name])
        }
        everywhere = all_gather_object((own, outside))
        if differing := _differing([own for own, _ in everywhere]):
            self._warn(
                f"the ranks hold different buffers: {differing}. {_OF_RANK_0}an evaluation on all ranks or an average "
                "over them, depends on the others. Let DDP broadcast the buffers of rank 0 in each step, as it does by "
                "default, or use SyncBatchNorm (Lightning: sync_batchnorm=True)"
            )
        if differing := _differing([outside for _, outside in everywhere]):
            self._warn(
                f"steps use a model outside DDP whose buffers differ between the ranks: {differing}. {_OF_RANK_0}"
                "a loss computed with that model, depends on the others. Send those of rank 0 to all ranks after each "
                "update (dist.broadcast(buffer, 0)), or use SyncBatchNorm"
            )


def _on_forward(module: nn.Module, name: str, running: set[str]) -> RemovableHandle:
    def note(*_: Any) -> None:
        running.add(name)

    return module.register_forward_pre_hook(note)


def _differing(by_rank: Sequence[Mapping[tuple[str, str], int]]) -> str:
    """Name the buffers that are not the same on all ranks; empty if there are none."""
    first, *others = by_rank
    found = sorted({key[1] for other in others for key, mark in first.items() if other.get(key) != mark})
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _own_of(model: DistributedDataParallel) -> Iterator[tuple[str, int]]:
    """The names and fingerprints of the buffers that no forward pass broadcasts from rank 0."""
    if not (model.broadcast_buffers and model.require_forward_param_sync):
        kind = type(model.module).__name__
        yield from ((f"{name} of {kind}", mark) for name, mark in _fingerprints(model.module))


def _fingerprints(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The names and fingerprints of a module's buffers."""
    yield from ((name, sampled([held])) for name, held in module.named_buffers() if has_values(held))
