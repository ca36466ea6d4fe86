"""Layers that are frozen or unfrozen during training, on several ranks."""

from __future__ import annotations

from torch import nn

from cluster_ddp.job import TrainSpec
from cluster_ddp.train.errors import TaskError


class FrozenLayers:
    """Refuses, on several ranks, layers frozen or unfrozen during training in a way that DDP does not support.

    DDP sums the gradients of the parameters that had ``requires_grad`` when it was created, and waits for all of them
    unless it looks for unused ones in each step. On a single rank, nothing is refused.
    """

    def __init__(self, model: nn.Module, train: TrainSpec, *, is_alone: bool) -> None:
        self._named = dict(model.named_parameters()) if not is_alone else {}
        self._parameters = list(self._named.values())
        self._first = [parameter.requires_grad for parameter in self._parameters]
        self._follows = train.find_unused_parameters and not train.static_graph

    def check(self) -> None:
        """Call before each update; raises a `TaskError` if a layer was frozen or unfrozen."""
        if not self._parameters:
            return
        now = [parameter.requires_grad for parameter in self._parameters]
        if now == self._first:
            return
        for name, was, is_trained in zip(self._named, self._first, now, strict=True):
            if is_trained and not was:
                raise TaskError(
                    f"{name} was frozen when training began and is trained now: on several ranks its gradients are not "
                    "summed; let model() return it with requires_grad=True, freeze it in the first call of loss() "
                    "before model(...), and set train.find_unused_parameters: true"
                )
            if was and not is_trained and not self._follows:
                raise TaskError(
                    f"{name} was trained when training began and is frozen now: on several ranks that needs "
                    "train.find_unused_parameters: true, without train.static_graph"
                )
