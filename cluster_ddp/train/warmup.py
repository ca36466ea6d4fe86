"""Settling DDP's gradient buckets before the first step, so that a resume sums in the order of an uninterrupted run."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from cluster_ddp.train.state import Stateful

_PASSES = 2


def settle_buckets(model: nn.Module, task: Stateful, loss: Callable[[], Tensor]) -> None:
    """Run throw-away forward and backward passes, and undo what they did.

    DDP lays out its buckets anew after the first backward pass, by the order in which gradients arrived. With three
    ranks or more the layout decides in which order numbers are added, and with it their last bits. A resumed process
    would use the first layout for one step more than the uninterrupted one did. So every attempt, the first too,
    settles the layout before it begins, on the same batch.

    Parameters
    ----------
    model
        The wrapped model, in training mode.
    task
        Its state, if any, is put back.
    loss
        Computes the loss of the first micro-batch of the training, with all generators seeded.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = copy.deepcopy(dict(task.state_dict()))
    for _ in range(_PASSES):
        loss().backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
    for buffer, before in buffers:
        buffer.data.copy_(before)
    if state:
        task.load_state_dict(state)
