"""Refuses layers that are unfrozen during training and whose gradients DDP does not synchronize."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.errors import TrainError


class Unfrozen:
    """Refuses to train what was frozen when DDP was created, because DDP does not sum its gradients.

    Parameters
    ----------
    wrapped
        The modules wrapped in DDP, as they are passed in.
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
        """Call before each update, on all ranks; takes 30 ns per tensor that was frozen.

        Raises
        ------
        TrainError
            The gradient of one of them differs between ranks: no DDP created since then sums it.
        """
        trained = [(name, weight) for name, weight in self._frozen.values() if weight.requires_grad]
        if not trained:
            return
        # The program unfreezes layers on all ranks at once, so all of them get here together.
        lowest, highest = _sums([weight for _, weight in trained])
        for (name, weight), low, high in zip(trained, lowest, highest, strict=True):
            if low == high != 0.0:
                del self._frozen[id(weight)]  # a newer DDP sums it
            elif low != high:
                raise TrainError(
                    f"{name} was frozen when it was put into DistributedDataParallel and is trained now: DDP does not "
                    "sum its gradients, and each rank would train its own model. Wrap the model in DDP while all of it "
                    "is trained, with find_unused_parameters=True, and freeze layers after that"
                )


def _sums(weights: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """For each gradient, the lowest and the highest over all ranks of the sum of its elements."""
    each = [torch.zeros(()) if weight.grad is None else weight.grad.detach().sum() for weight in weights]
    sums = torch.stack([total.to(weights[0].device, torch.float64) for total in each]).nan_to_num(0.0, 0.0, 0.0)
    both = torch.stack([sums, -sums])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return (-both[1]).tolist(), both[0].tolist()


def _has_left_out(ddp: DistributedDataParallel) -> bool:
    """Whether something was frozen when DDP was created; no public API says so."""
    count: int = ddp._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    return count < len(list(ddp.module.parameters()))
