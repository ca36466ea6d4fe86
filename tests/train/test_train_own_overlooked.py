"""Modules and generators that the steps of a loop change, and that nobody has passed in, are told."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import Images, begin_attempt, model_of, new_run
from own_loops import told as warnings_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.objects.held import of_module
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.program import reachable
from cluster_ddp.train.own.twins import twins
from cluster_ddp.train.own.watch.first_steps import FirstSteps
from cluster_ddp.train.own.watch.overlooked import watch_overlooked


class Average(nn.Module):
    """An average of the weights, as many libraries keep it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.average = model, copy.deepcopy(model)

    def update(self) -> None:
        for kept, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(weight.data, alpha=0.1)


class Options:
    """Holds what a loop draws from."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator


def told(handed: bool = True, draw: Any = None, seeded: tuple[Any, ...] = (), options: Any = None) -> list[str]:
    """What is told of two steps that train a model and an average of it, and draw."""
    messages: list[str] = []
    model = nn.Linear(3, 2)
    teacher, average = nn.Linear(3, 2), Average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = [*model.parameters(), *(average.parameters() if handed else ())]
    steps = FirstSteps([watch_overlooked(lambda: kept, lambda: seeded, messages.append)])
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(3)) - teacher(torch.ones(3))).square().sum().backward()
        optimizer.step()
        average.update()
        if draw is not None:
            draw()
        steps.end_step()
    return messages


def test_an_average_that_is_not_handed_over_is_told_once() -> None:
    (message,) = told(handed=False)
    assert "a module that was not passed in (Average)" in message
    assert told() == []


@pytest.mark.parametrize(
    ("generator", "draw", "name"),
    [
        (np.random.default_rng(1), lambda generator: generator.random(), "Generator"),
        (np.random.RandomState(1), lambda generator: generator.random_sample(), "RandomState"),
        (random.Random(1), lambda generator: generator.random(), "random.Random"),
        (torch.Generator(), lambda generator: torch.rand(1, generator=generator), "torch._C.Generator"),
    ],
)
def test_a_generator_of_the_loop_s_own_is_told_once(generator: Any, draw: Any, name: str) -> None:
    options = Options(generator)
    (message,) = told(draw=lambda: draw(generator), options=options)
    assert f"{name})" in message
    assert told(draw=lambda: draw(generator), options=options, seeded=(generator,)) == []
    assert told(draw=random.random) == []


class Mixing:
    """Draws from a generator of its class."""

    rng = np.random.default_rng(1)


class Pipeline:
    """Has steps that draw, each from its own generator."""

    def __init__(self) -> None:
        self.steps = [Options(np.random.default_rng(1))]


def test_a_generator_of_a_class_or_deep_in_an_object_is_told() -> None:
    (message,) = told(draw=lambda: Mixing.rng.random())
    assert "Generator)" in message
    options = Options(Options(Pipeline()))
    (message,) = told(draw=lambda: options.generator.generator.steps[0].generator.random(), options=options)
    assert "Generator)" in message


def test_a_weight_that_a_hook_computes_in_each_pass_is_no_change() -> None:
    """As in the discriminators of GANs: what it is computed from is in the checkpoint."""
    model = nn.utils.spectral_norm(nn.Linear(3, 2))
    before = Attributes(of_module(model))
    model(torch.ones(3))
    assert before.changed(Attributes(of_module(model))) == []


def test_a_model_that_is_compiled_after_it_was_handed_over_has_not_changed() -> None:
    model = nn.Linear(3, 2)
    before = Attributes(of_module(model))
    assert torch.compile(model, backend="eager") is not model
    assert before.changed(Attributes(of_module(model))) == []


def test_the_copy_by_which_a_state_is_tried_is_not_told() -> None:
    """A model that holds itself, as one whose forward() was exchanged: its copy is there until cycles are collected."""
    messages: list[str] = []
    model = nn.Linear(3, 2)
    model.itself = [model]  # type: ignore[assignment]
    copied, _ = twins(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = FirstSteps([watch_overlooked(model.parameters, lambda: (), messages.append)])
    for _ in range(2):
        copied.weight.data.add_(1.0)  # type: ignore[operator, union-attr]
        steps.end_step()
    assert messages == []


def test_a_dict_with_parameters_as_keys_is_looked_through_without_reading_them() -> None:
    """What PyTorch makes of a tensor as text takes 0.3 ms, and an optimizer has a state for each."""
    state = {nn.Parameter(torch.ones(2)): "a", "b": 1}
    assert [name for name, _ in reachable([("state", state)], 2)] == ["state", "state[Parameter]", "state['b']"]


class Ring(nn.Module):
    """A memory of the last samples, as in cross-batch losses: where it goes on is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 6))
        self.register_buffer("labels", torch.empty(0))  # which hides nothing, and changes with nothing
        self.place = {"row": 0}

    def put(self, row: torch.Tensor) -> None:
        self.memory[self.place["row"] % 4] = row
        self.place["row"] += 1


def train_with_a_ring(place: Path) -> None:
    begin_attempt(place, 0)
    with join_run() as run:
        model, ring = model_of(), Ring()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = model.register_forward_hook(lambda module, inputs, output: output)
        model.is_late = False  # type: ignore[assignment]
        for step in run.steps(4, model=model, optimizer=optimizer, ring=ring):
            optimizer.zero_grad()
            rows = torch.rand(4, 6)
            (model(rows).square().mean() + ring.memory.sum()).backward()
            optimizer.step()
            ring.put(rows[0])
            model.is_late = step == 3  # type: ignore[assignment]
        hook.remove()
        ring.history = [1.0]


def test_a_count_in_another_module_that_is_handed_over_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train_with_a_ring, 1, run.path)
    first, last = warnings_of(run)
    assert first.startswith("training changes ring.place, which no checkpoint contains")
    assert last.startswith(
        "training changes model.is_late, which no checkpoint contains"
    )  # nothing of behind the steps


def accumulate(place: Path) -> None:
    """A loop that updates in each fourth batch, and only then keeps an average of weights and sends gradients."""
    begin_attempt(place, 0)
    with join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(model_of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = Average(model.module)
        loader = run.resumable(
            DataLoader(Images(), batch_size=4, sampler=DistributedSampler(Images())),
            model=model,
            optimizer=optimizer,
            epochs=3,
        )
        for _ in loader.epochs():
            for number, (inputs, _) in loader.enumerate():
                updates = number % 4 == 3
                with nullcontext() if updates else model.no_sync():
                    model(inputs).square().mean().backward()
                if updates:
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update()


def test_updates_are_watched_and_not_batches_where_gradients_accumulate(tmp_path: Path) -> None:
    """After two batches no average has moved, and DDP has not yet sent its buffers."""
    run = new_run(tmp_path)
    run_ranks(accumulate, 2, run.path)
    (message,) = warnings_of(run)
    assert "a module that was not passed in (Average)" in message


class Environment:
    """Saves the state of its generator."""

    def __init__(self, *, saves: bool) -> None:
        self.generator, self._saves = np.random.default_rng(1), saves

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state} if self._saves else {"seed": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._saves:
            self.generator.bit_generator.state = state["generator"]


def test_a_generator_counts_as_saved_if_what_is_passed_in_saves_its_state() -> None:
    model = nn.Linear(3, 2)
    for saves in (True, False):
        environment = Environment(saves=saves)
        optimizer = torch.optim.SGD(model.parameters())
        passed_in = PassedIn({"model": model, "optimizer": optimizer, "environment": environment}, 1)
        assert list(passed_in.generators()) == [environment.generator] * saves
