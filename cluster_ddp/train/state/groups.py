"""Checks that training keeps an optimizer's groups and defaults, since a resume recreates them by `optimizer()`."""

from __future__ import annotations

import operator
from typing import Any

from torch.optim import Optimizer

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.comparing import is_same


class FirstGroups:
    """The groups of an optimizer before the first step, which a resume recreates and training must keep.

    The settings of a group may change, because checkpoints contain them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._defaults = dict(_defaults(optimizer))

    def check(self) -> None:
        """Raise a `TaskError` for new groups, groups whose parameters or their order changed, and changed defaults.

        Cheap enough for every step: with ten thousand parameters, it takes a thousandth of one.
        """
        groups, defaults = self._optimizer.param_groups, _defaults(self._optimizer)
        check_groups(self._optimizer, len(self._members))
        for number, first in enumerate(self._members):
            now = groups[number]["params"]
            if len(now) != len(first) or not all(map(operator.is_, now, first)):
                raise TaskError(
                    f"group {number} of the optimizer holds different parameters, or in a different order, than "
                    "before the first step, which a resume could not repeat: let each stay where it was put when the "
                    "optimizer was made. One that is not to be trained any more gets requires_grad=False; settings, "
                    "such as weight_decay, may change for a group"
                )
        if not all(map(operator.is_, defaults.values(), self._defaults.values())):
            self._check_defaults(defaults)

    def _check_defaults(self, now: dict[str, Any]) -> None:
        for name, first in self._defaults.items():
            if not is_same(now.get(name, first), first):
                raise TaskError(
                    f"training has changed {name} in the optimizer's defaults, which no checkpoint contains: change it "
                    "in optimizer.param_groups, whose settings are saved"
                )


def check_groups(optimizer: Optimizer, at_first: int) -> None:
    """Raise a `TaskError` for groups added since the first step, which a resume could not repeat."""
    if len(optimizer.param_groups) != at_first:
        raise TaskError(
            f"the optimizer had {at_first} parameter groups before the first step and has "
            f"{len(optimizer.param_groups)} now, which a resume could not repeat: give it all parameters when it is "
            "created (in your own loop, before run.resumable() or run.steps()), and let those that are trained later "
            "start with requires_grad=False; they may be a separate group with another learning rate"
        )


def _defaults(optimizer: Optimizer) -> dict[str, Any]:
    return getattr(optimizer, "defaults", {})  # an optimizer that wraps another may have none
