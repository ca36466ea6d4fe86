"""Gives weights that had a gradient one of zeros after a resume, as `zero_grad(set_to_none=False)` leaves them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster_ddp.train.ranks.distributed import broadcast_object


class ZeroGradients:
    """Which weights have a gradient.

    Optimizers also update a weight whose gradient is zero, such as that of a head which a batch does not use, by its
    momentum and the weight decay, but not one that has none. Where the program sets gradients to None, as
    ``zero_grad()`` does, it does so before it uses these, too.

    Parameters
    ----------
    weights
        The trained weights.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self.have = ""
        """For each weight "1" if it had a gradient when this was last gathered on rank 0, "s" if a sparse one, or "0".
        """

    def gather(self) -> None:
        """Look at the weights; all ranks call it before a save."""
        self.have = broadcast_object(self.found())

    def found(self) -> str:
        """Which have a gradient now, as in `have`."""
        return "".join(map(_kind_of, self._weights))

    def restore(self, have: str) -> None:
        """Give the weights that had a gradient one of zeros."""
        self.have = have
        for weight, kind in zip(self._weights, have, strict=False):
            if kind != "0" and weight.grad is None and weight.requires_grad:
                weight.grad = torch.zeros_like(weight, layout=torch.sparse_coo if kind == "s" else None)


def _kind_of(weight: Tensor) -> str:
    if weight.grad is None:
        return "0"
    return "s" if weight.grad.is_sparse else "1"
