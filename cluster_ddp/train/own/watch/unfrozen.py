"""Refuses layers that are unfrozen in training and that DDP leaves to each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.errors import TrainError


class Unfrozen:
    """Sees that nothing is trained that was frozen when DDP was made, which sums no gradients of it.

    Parameters
    ----------
    wrapped
        The modules in DDP, when they are passed in.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        self._frozen = {
            id(weight): (name, weight)
            for ddp in wrapped
            if _has_left_out(ddp)
            for name, weight in ddp.module.named_parameters()
            if not weight.requires_grad
        }

    def __bool__(self) -> bool:
        return bool(self._frozen)

    def check(self) -> None:
        """Call before each update, on all ranks: 30 ns for each tensor that was frozen.

        Raises
        ------
        TrainError
            One of them has another gradient on each rank: no DDP that was made since sums it.
        """
        trained = [(name, weight) for name, weight in self._frozen.values() if weight.requires_grad]
        if not trained:
            return
        # Layers are unfrozen by the program, on all ranks at once, so that they all come here together.
        lowest, highest = _sums([weight for _, weight in trained])
        for (name, weight), low, high in zip(trained, lowest, highest, strict=True):
            if low == high != 0.0:
                del self._frozen[id(weight)]  # another DDP sums it
            elif low != high:
                raise TrainError(
                    f"{name} was frozen when it was put into DistributedDataParallel and is trained now: DDP does not "
                    "sum its gradients, and each rank would train its own model. Make DDP while all is trained, "
                    "with find_unused_parameters=True, and freeze layers after that"
                )


def _sums(weights: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Of each gradient the sum of the elements: the lowest of all ranks, and the highest."""
    each = [torch.zeros(()) if weight.grad is None else weight.grad.detach().sum() for weight in weights]
    sums = torch.stack([total.to(weights[0].device, torch.float64) for total in each]).nan_to_num(0.0, 0.0, 0.0)
    both = torch.stack([sums, -sums])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return (-both[1]).tolist(), both[0].tolist()


def _has_left_out(ddp: DistributedDataParallel) -> bool:
    """Whether something was frozen when it was made; nothing public says so."""
    count: int = ddp._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    return count < len(list(ddp.module.parameters()))
