"""Detects buffers that differ between ranks, of which a checkpoint contains only rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.distributed import all_gather_object
from cluster_ddp.train.own.values import has_values, sampled

_SHOWN = 5  # names in the message


class RankBuffers:
    """Warns, after the second step, if DDP does not broadcast the buffers before the next forward pass.

    This is so with ``broadcast_buffers=False``, or if every forward pass runs without gradient synchronization, as in
    Lightning's manual optimization.

    Parameters
    ----------
    wrapped
        The models wrapped in DDP.
    warn
        Called with the message.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel], warn: Callable[[str], None]) -> None:
        self._wrapped, self._warn = wrapped, warn

    def first(self) -> None:
        """Does nothing: buffers are compared after the second step."""

    def second(self) -> None:
        """Call after the second step, on all ranks."""
        if not self._wrapped:
            return
        own = {(at, name): look for at, model in enumerate(self._wrapped) for name, look in _own_of(model)}
        first, *others = all_gather_object(own)
        if differing := sorted({key[1] for other in others for key, look in first.items() if other.get(key) != look}):
            more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
            self._warn(
                f"the ranks hold different buffers: {', '.join(differing[:_SHOWN])}{more}. A checkpoint contains those "
                "of rank 0, and a resume gives them to all ranks: it is exact only if nothing, such as an evaluation "
                "on all ranks or an average over them, depends on the others. Let DDP broadcast the buffers of rank 0 "
                "in each step, as it does by default, or use SyncBatchNorm (Lightning: sync_batchnorm=True)"
            )


def _own_of(model: DistributedDataParallel) -> Iterator[tuple[str, int]]:
    """The names and fingerprints of the buffers that no forward pass broadcasts from rank 0."""
    if not (model.broadcast_buffers and model.require_forward_param_sync):
        kind = type(model.module).__name__
        found = ((name, held) for name, held in model.module.named_buffers() if has_values(held))
        yield from ((f"{name} of {kind}", sampled([held])) for name, held in found)
