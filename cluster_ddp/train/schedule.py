"""The learning rate as a function of the number of updates made.

Rules: linear scaling with the global batch and a gradual warm-up from Goyal et al. 2017 (arXiv:1706.02677), square-root
scaling from Krizhevsky 2014 (arXiv:1404.5997), cosine decay from Loshchilov and Hutter 2017 (arXiv:1608.03983).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from cluster_ddp.job import TrainSpec
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.state.groups import check_groups


class Schedule:
    """Sets the learning rate of every group of an optimizer.

    Groups keep their ratio: if a task gives its backbone a tenth of the rate, it stays a tenth.

    Parameters
    ----------
    peak
        The peak rate, to which `train.min_lr` is relative.
    total
        The number of updates in the whole training, where the cosine and linear decay end.
    warn
        Called once if something else has set a rate, which has no effect because no checkpoint contains it.

    Raises
    ------
    TaskError
        A group has no learning rate.
    """

    def __init__(
        self, train: TrainSpec, optimizer: Optimizer, *, peak: float, total: int, warn: Callable[[str], None]
    ) -> None:
        self._optimizer = optimizer  # load_state_dict replaces its groups, so they are looked up each time
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise TaskError(
                f"optimizer() returned {type(optimizer).__name__} without a learning rate, so it chooses its own: the "
                "trainer sets the rate of each step; give it lr, and turn off its own schedule"
            )
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # it is changed in place, and the task and `defaults` may refer to it
                group["lr"] = group["lr"].clone()
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._peak = peak
        self._warmup = train.warmup_steps
        self._shape = _shapes(train, peak=peak, total=total)[train.schedule]
        self._warn = warn
        self._rates: list[float | None] = [None] * len(self._peaks)  # as last set
        self._has_warned = False

    def factor(self, update: int) -> float:
        """The fraction of the peak rate for update number `update`, counted from 0."""
        if update < self._warmup:
            return (update + 1) / self._warmup
        return self._shape(update)

    def lr(self, update: int) -> float:
        """The rate of update number `update` for a group at the peak rate."""
        return self._peak * self.factor(update)

    def apply(self, update: int) -> None:
        """Set the rates for update number `update`."""
        check_groups(self._optimizer, len(self._peaks))
        factor, rates = self.factor(update), self._rates
        for number, group in enumerate(self._optimizer.param_groups):
            rate = self._peaks[number] * factor
            if group["lr"] is not rates[number]:  # the first time, or set by something else
                self._look_at(number, group["lr"])
            if isinstance(group["lr"], Tensor):  # required by compiled optimizers and those of torchao
                group["lr"].fill_(rate)
            else:
                group["lr"] = rates[number] = rate

    def _look_at(self, number: int, found: Any) -> None:
        """Warn if a rate is not the one last set; tensors are not checked, as reading one from a device takes time."""
        rate = self._rates[number]
        if self._has_warned or rate is None or isinstance(found, Tensor) or found == rate:
            return
        self._has_warned = True
        self._warn(
            f"the learning rate of the optimizer's group {number} was set to {found:g} in training, which has no "
            f"effect: the trainer sets the rate of each update by train.schedule, here {rate:g}. Let train.schedule "
            "control it; to give a group its own rate, set the group's lr in optimizer()"
        )


def _shapes(train: TrainSpec, *, peak: float, total: int) -> dict[str, Callable[[int], float]]:
    least = train.min_lr / peak if peak else 0.0
    span = max(1, total - train.warmup_steps)
    drop_every = train.decay_every or max(1, -(-total // 3))

    def progress(update: int) -> float:
        return min(1.0, (update - train.warmup_steps) / span)

    return {
        "constant": lambda _: 1.0,
        "cosine": lambda update: least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * progress(update))),
        "linear": lambda update: 1.0 - (1.0 - least) * progress(update),
        "step": lambda update: max(least, train.decay_factor ** (update // drop_every)),
    }
