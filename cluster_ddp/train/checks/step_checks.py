"""What is checked around the steps of a task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import nn

from cluster_ddp.job import BatchPlan, TrainSpec
from cluster_ddp.train.checks.compiling import Compiling
from cluster_ddp.train.checks.first_steps import FirstSteps
from cluster_ddp.train.checks.frozen_layers import FrozenLayers
from cluster_ddp.train.checks.single_samples import SingleSamples
from cluster_ddp.train.data.order import SampleStream


class StepChecks:
    """Refuses steps that would not train what is meant, and tells of those that a resume may not repeat.

    Parameters
    ----------
    model, wrapped
        The bare model, and what loss() is given.
    order
        The global batches; None if they are not known in advance.
    warn
        Prints a warning on rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        train: TrainSpec,
        plan: BatchPlan,
        order: SampleStream | None,
        warn: Callable[[str], None],
    ) -> None:
        self._first_steps = FirstSteps(wrapped, warn, accumulates=plan.accumulation_steps > 1)
        self._frozen_layers = FrozenLayers(model, train, is_alone=wrapped is model)
        self._single_samples = SingleSamples(model, order, plan)
        self._compiling = Compiling(warn)

    def resume(self, step: int) -> None:
        """Call when the number of finished steps is known."""
        self._single_samples.begin(step)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Surround a call of loss(); raises a `TaskError` if that takes the model for the bare one."""
        return self._first_steps.computing()

    def check_gradients(self) -> None:
        """Call when the gradients of a step are complete; all ranks call it together.

        Raises
        ------
        TaskError
            They are not those of the whole global batch on all ranks.
        """
        self._first_steps.end()
        self._frozen_layers.check()

    def end(self, step: int) -> None:
        """Call after a step, which is counted from 1."""
        self._single_samples.end()
        self._compiling.end(step)

    def evaluated(self) -> None:
        """Call after an evaluation."""
        self._compiling.evaluated()
