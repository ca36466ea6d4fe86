"""DDP's gradient buckets, brought to their final layout without a loss."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.errors import TrainError

_PASSES = 2  # after the first DDP lays its buckets out again; the second runs in the new layout


def settle_layout(model: nn.Module, world_size: int) -> None:
    """Bring DDP to the bucket layout that it keeps, in a fresh attempt and in a resumed one alike.

    DDP lays out its buckets again after the first backward pass, by the order in which gradients arrived. With three
    ranks or more the layout decides in which order numbers are added, and with it their last bits: a resumed process
    would use the first layout for one step more than the uninterrupted one did. Here gradients of zeros arrive in an
    order that every attempt repeats, the reverse of their registration. DDP that looks for unused parameters keeps its
    first layout; there is nothing to settle.

    Parameters
    ----------
    model
        The wrapped model, before its first forward pass. Any other module is left alone.
    world_size
        Ranks in the group.

    Raises
    ------
    TrainError
        DDP was given ``static_graph=True``, which settles its layout by the first real backward pass, and there are
        three ranks or more.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph:
        if world_size > 2:
            raise TrainError(
                "DistributedDataParallel(static_graph=True) on three ranks or more cannot be resumed exactly: it lays "
                "out its gradient buckets by the first backward pass of each attempt; leave static_graph out"
            )
        return
    if model.find_unused_parameters:
        return
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    # What DistributedDataParallel.forward does around the module's; the reducer has no public way.
    reducer = model.reducer
    for _ in range(_PASSES):
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
        for parameter in reversed(parameters):
            (parameter.reshape(-1)[:1] * 0).sum().backward()
        for parameter in parameters:
            parameter.grad = None
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
