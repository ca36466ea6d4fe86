"""A BatchNorm for which an epoch leaves a single sample."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cluster_ddp.job import BatchPlan
from cluster_ddp.train.data.order import SampleStream, rank_micro_batches
from cluster_ddp.train.errors import TaskError


class SingleSamples:
    """Refuses, in the first forward pass, a BatchNorm that would get a single value per channel at the end of an epoch.

    With ``train.drop_last: false``, a rank may be left with one sample of the last batch, for which BatchNorm raises.
    The first pass shows whether it gets more than one value per sample, as with images.

    Parameters
    ----------
    order
        The global batches; None if they are not known in advance.
    """

    def __init__(self, model: nn.Module, order: SampleStream | None, plan: BatchPlan) -> None:
        self._handles: list[RemovableHandle] = []
        if order is None or order.drop_last:
            return
        last = order.steps_per_epoch - 1
        if order.size(last) == order.global_batch or _fewest_samples(order, plan, last) > 1:
            return
        self._order, self._plan = order, plan
        self._left = order.size(last)
        self._samples = _fewest_samples(order, plan, step=0)
        self._handles = [
            module.register_forward_pre_hook(self._judge)
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    def begin(self, step: int) -> None:
        """Call when the first step is known: a run may resume just before the last batch of an epoch."""
        if self._handles:
            self._samples = _fewest_samples(self._order, self._plan, step)

    def end(self) -> None:
        """Call after the first step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _judge(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training and inputs[0].numel() <= self._samples * inputs[0].shape[1]:
            raise TaskError(
                f"train.drop_last: false leaves {self._left} sample{'s' * (self._left > 1)} for the last batch of an "
                "epoch, so a rank gets only one of them, but BatchNorm needs two: set train.drop_last: true, or "
                "another train.global_batch"
            )


def _fewest_samples(order: SampleStream, plan: BatchPlan, step: int) -> int:
    """Samples in the smallest forward pass of a step, over all ranks."""
    of_ranks = (rank_micro_batches(order, plan, rank, step, step + 1) for rank in range(plan.world_size))
    return min(len(micro.indices) for rank in of_ranks for micro in rank)
