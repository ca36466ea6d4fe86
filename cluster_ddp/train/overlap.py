"""Finds out whether a save may go on copying the weights from a GPU while the next step computes its loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from cluster_ddp.checkpoint.replicas import tensor_digests
from cluster_ddp.train.optimizer import parameters_of

_STEPS = 2  # of an attempt in which it looks


class Overlap:
    """Says whether it may: not if loss() or the backward pass changes what the optimizer holds, such as by clipping.

    It looks in the first steps of an attempt, which costs two readings of the weights in each. Of a task that begins
    later to change them, the first save that this spoils fails (see `Checkpointer.save`).

    Attributes
    ----------
    is_allowed
        Whether the weights lie on a GPU, those steps are over, and have changed no weights before their update.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.is_allowed = False
        self._optimizer = optimizer  # load_state_dict replaces its groups
        # A save from the CPU has copied everything when it returns; only the ranks still compare their weights.
        self._left = 0 if device.type == "cpu" else _STEPS
        self._changes = False
        self._before: Tensor | None = None

    def begin(self) -> None:
        """Call before the first forward pass of a step."""
        if self._left:
            self._before = self._digests()

    def end(self) -> None:
        """Call after the last backward pass of a step, before the update."""
        if self._before is not None:
            self._changes |= not torch.equal(self._before, self._digests())
            self._before, self._left = None, self._left - 1
            self.is_allowed = not (self._left or self._changes)

    def _digests(self) -> Tensor:
        return tensor_digests([weight.detach() for weight in parameters_of(self._optimizer)])
