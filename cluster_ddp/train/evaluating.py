"""What an evaluation finds and leaves behind: the weights to evaluate, and the state as if it had not begun."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.buffers import Buffers
from cluster_ddp.train.task import Task, expect_type


class Switching(Protocol):
    """An optimizer that trains with other weights than it evaluates with, as those of the package schedulefree do."""

    param_groups: list[dict[str, Any]]

    def train(self) -> Any:
        """Put the weights to train with into the parameters."""

    def eval(self) -> Any:
        """Put the weights to evaluate with into the parameters."""


def switches(optimizer: object) -> TypeGuard[Switching]:
    """Whether an optimizer has weights of its own to evaluate with."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def make_optimizer(task: Task, model: nn.Module, lr: float) -> Optimizer:
    """What ``optimizer()`` of the task gives, ready to train."""
    optimizer = expect_type(task.optimizer(model, lr), Optimizer, "optimizer()")
    if switches(optimizer):
        optimizer.train()
    return optimizer


@contextlib.contextmanager
def weights_to_evaluate(optimizer: Optimizer | Switching) -> Iterator[None]:
    """Let the parameters hold what the optimizer evaluates with, and afterwards the same bits as before.

    Switching back is arithmetic that rounds: an evaluation that is done again after a stop must leave no trace.
    """
    if not switches(optimizer):
        yield
        return
    weights = [weight.detach() for weight in _held_in(optimizer.param_groups)]
    kept = [weight.clone() for weight in weights]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_(weights, kept)


class EvaluatedWeights:
    """What a switching optimizer evaluates with, which a checkpoint holds as the averages beside what it trains with.

    It follows from the rest, so that a resume needs nothing of it; ``export --ema`` gives it.
    """

    def __init__(self, model: nn.Module, optimizer: Switching) -> None:
        held = _held_in(optimizer.param_groups)
        self._optimizer = optimizer
        self._weights = [weight.detach() for weight in held]
        self._evaluated = [weight.clone() for weight in self._weights]
        places = {id(weight): place for place, weight in enumerate(held)}
        named = model.state_dict(keep_vars=True).items()
        self._named = {name: self._evaluated[places[id(weight)]] for name, weight in named if id(weight) in places}

    def refresh(self) -> None:
        """Take the weights as they are now; nothing else may be reading the parameters."""
        with weights_to_evaluate(self._optimizer):
            torch._foreach_copy_(self._evaluated, self._weights)

    def tensors(self) -> dict[str, Tensor]:
        """By the names that they have in the model, as they were at `refresh`."""
        return self._named

    def restore(self, updates: int) -> None:
        """Nothing is to be told: the next `refresh` does not go by what was put back."""


def evaluated_weights(model: nn.Module, optimizer: Optimizer) -> EvaluatedWeights | None:
    """What the optimizer evaluates with; None for most, which evaluate with what they train with."""
    return EvaluatedWeights(model, optimizer) if switches(optimizer) else None


class BeforeEvaluation:
    """The state that an evaluation may change, to be put back when it is abandoned: it will be done again.

    Parameters
    ----------
    model
        The model that is trained.
    evaluated
        The one that is evaluated: the same, or the average. Its weights change where an embedding has ``max_norm``. The
        copies of them take the room of the gradients, of which there are none then.
    """

    def __init__(self, model: nn.Module, evaluated: nn.Module, buffers: Buffers, task: Task) -> None:
        self._buffers, self._task = buffers, task
        buffers.keep()
        self._weights = [weight.detach() for weight in evaluated.parameters() if weight.requires_grad]
        self._kept = [weight.clone() for weight in self._weights]
        self._extra_state = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in model.modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        self._task_state = copy.deepcopy(dict(task.state_dict()))

    def put_back(self) -> None:
        """Make weights, buffers, modules and task what they were."""
        torch._foreach_copy_(self._weights, self._kept)
        self._buffers.put_back(True)
        for module, state in self._extra_state:
            module.set_extra_state(state)
        if self._task_state:
            self._task.load_state_dict(self._task_state)


def _held_in(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [weight for group in groups for weight in group["params"]]
