"""Optimizers that evaluate with other weights than they train with, such as those of the package schedulefree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.train.checks.unsuited_optimizers import refuse_unfinished, refuse_without_group
from cluster_ddp.train.optimizer import HasGroups, parameters_of
from cluster_ddp.train.task import Task, expect_type


class Switching(HasGroups, Protocol):
    """An optimizer that evaluates with other weights than it trains with, such as those of the package schedulefree."""

    def train(self) -> Any:
        """Put the training weights into the parameters."""

    def eval(self) -> Any:
        """Put the evaluation weights into the parameters."""


def switches(optimizer: object) -> TypeGuard[Switching]:
    """Whether an optimizer has its own weights for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def make_optimizer(task: Task, model: nn.Module, lr: float) -> Optimizer:
    """Create the task's optimizer, in training mode."""
    try:
        made = task.optimizer(model, lr)
    except (RuntimeError, ValueError) as error:
        refuse_without_group(error)
        raise
    optimizer = expect_type(made, Optimizer, "optimizer()")
    refuse_unfinished(optimizer)
    if switches(optimizer):
        optimizer.train()
    return optimizer


@contextlib.contextmanager
def weights_to_evaluate(optimizer: Optimizer | Switching) -> Iterator[None]:
    """Put the optimizer's evaluation weights into the parameters, and afterwards restore the same bits as before.

    Switching back involves rounding, but an evaluation that is repeated after a stop must leave no trace.
    """
    if not switches(optimizer):
        yield
        return
    weights = [weight.detach() for weight in parameters_of(optimizer)]
    kept = [weight.clone() for weight in weights]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_(weights, kept)


class EvaluationWeights:
    """The evaluation weights of a switching optimizer, which checkpoints contain as the averages.

    They are derived from the rest of the state, so a resume does not need them; ``export --ema`` writes them.
    """

    def __init__(self, model: nn.Module, optimizer: Switching) -> None:
        held = parameters_of(optimizer)
        self._optimizer = optimizer
        self._weights = held  # not detached: their data may be replaced
        self._evaluated = [weight.detach().clone() for weight in held]
        places = {id(weight): place for place, weight in enumerate(held)}
        named = model.state_dict(keep_vars=True).items()
        self._named = {name: self._evaluated[places[id(weight)]] for name, weight in named if id(weight) in places}

    def refresh(self) -> None:
        """Copy the current evaluation weights; nothing else may be reading the parameters."""
        with weights_to_evaluate(self._optimizer):
            torch._foreach_copy_(self._evaluated, [weight.detach() for weight in self._weights])

    def tensors(self) -> dict[str, Tensor]:
        """The weights as of the last `refresh`, by their names in the model."""
        return self._named

    def remark(self) -> str:
        """What to tell the user about them."""
        return (
            f"{type(self._optimizer).__name__} evaluates with weights other than those that it trains (its eval()): "
            "checkpoints contain both, and export --ema writes them"
        )

    def restore(self, updates: int) -> None:
        """Do nothing: the next `refresh` does not depend on what was restored."""


def evaluation_weights_of(model: nn.Module, optimizer: Optimizer) -> EvaluationWeights | None:
    """The optimizer's evaluation weights; None for most optimizers, which evaluate with the training weights."""
    return EvaluationWeights(model, optimizer) if switches(optimizer) else None
