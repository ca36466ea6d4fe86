"""What each step sets before it reads it, such as the features that a hook notes, is not told; what is kept is."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import begin_attempt, model_of, new_run, told
from torch import Tensor, nn
from train_ranks import run_ranks

from cluster_ddp.train import join_run

Hooked = tuple[Callable[[], None], Callable[[], Tensor]]  # what begins a step, and what its loss takes of the hook


def in_a_dict(layer: nn.Module) -> Hooked:
    found_features: dict[str, Tensor] = {}

    def note(_: Any, __: Any, output: Tensor) -> None:
        found_features["first"] = output.detach()

    layer.register_forward_hook(note)
    return lambda: None, lambda: found_features["first"].mean()


class Extractor:
    """Notes a layer's outputs."""

    def __init__(self, layer: nn.Module) -> None:
        self.noted_features: dict[str, Tensor] = collections.OrderedDict()
        layer.register_forward_hook(self.note)

    def note(self, _: Any, __: Any, output: Tensor) -> None:
        self.noted_features["first"] = output


def in_an_object(layer: nn.Module) -> Hooked:
    extractor = Extractor(layer)
    return lambda: None, lambda: extractor.noted_features["first"].mean()


def in_a_list_that_is_emptied(layer: nn.Module) -> Hooked:
    outputs_of_step: list[Tensor] = []
    layer.register_forward_hook(lambda _, __, output: outputs_of_step.append(output))
    return lambda: outputs_of_step.clear(), lambda: outputs_of_step[-1].mean()


def in_an_attribute(layer: nn.Module) -> Hooked:
    def note(module: Any, _: Any, output: Tensor) -> None:
        module.last_output = output.detach()

    layer.register_forward_hook(note)
    return lambda: None, lambda: layer.last_output.mean()  # type: ignore[operator, union-attr, return-value]


def in_an_attribute_of_none(layer: nn.Module) -> Hooked:
    layer.newest_output = None  # type: ignore[assignment]

    def note(module: Any, _: Any, output: Tensor) -> None:
        module.newest_output = output.detach()

    layer.register_forward_hook(note)
    return lambda: None, lambda: (0.5 * layer.newest_output).mean() + layer.newest_output.mean()  # type: ignore[operator, union-attr, return-value]


def kept_in_an_attribute_of_none(layer: nn.Module) -> Hooked:
    layer.before_this = None  # type: ignore[assignment]

    def note(module: Any, _: Any, output: Tensor) -> None:
        before = module.before_this
        module.before_this = output.detach() + (0.0 if before is None else 0.5 * before)

    layer.register_forward_hook(note)
    return lambda: None, lambda: layer.before_this.mean()  # type: ignore[operator, union-attr, return-value]


def kept_in_a_dict(layer: nn.Module) -> Hooked:
    running: dict[str, Tensor] = {}

    def note(_: Any, __: Any, output: Tensor) -> None:
        mean = output.detach().mean()
        running["mean"] = 0.9 * running["mean"] + 0.1 * mean if "mean" in running else mean

    layer.register_forward_hook(note)
    return lambda: None, lambda: running["mean"]


def given_anyway(layer: nn.Module) -> Hooked:
    by_default: dict[str, Tensor] = collections.defaultdict(lambda: torch.zeros(()))

    def note(_: Any, __: Any, output: Tensor) -> None:
        by_default["mean"] = 0.9 * by_default["mean"] + 0.1 * output.detach().mean()

    layer.register_forward_hook(note)
    return lambda: None, lambda: by_default["mean"]


def kept_where_an_error_says_that_there_is_none(layer: nn.Module) -> Hooked:
    before_this: dict[str, Tensor] = {}

    def note(_: Any, __: Any, output: Tensor) -> None:
        try:
            before_this["sum"] = before_this["sum"] + output.detach().sum()
        except KeyError:
            before_this["sum"] = output.detach().sum()

    layer.register_forward_hook(note)
    return lambda: None, lambda: before_this["sum"]


def kept_in_a_list(layer: nn.Module) -> Hooked:
    outputs_of_all: list[Tensor] = []

    def begin() -> None:
        del outputs_of_all[:-1]

    layer.register_forward_hook(lambda _, __, output: outputs_of_all.append(output.detach()))
    return begin, lambda: outputs_of_all[0].mean()


def kept_in_an_attribute(layer: nn.Module) -> Hooked:
    def note(module: Any, _: Any, output: Tensor) -> None:
        module.lately = output.detach() + 0.5 * getattr(module, "lately", 0.0)

    layer.register_forward_hook(note)
    return lambda: None, lambda: layer.lately.mean()  # type: ignore[operator, union-attr, return-value]


def train(place: Path, hook: Callable[[nn.Module], Hooked]) -> None:
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        begin, read = hook(model.get_submodule("0"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in run.steps(4, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            begin()
            outputs = model(torch.rand(4, 6))
            (outputs.mean() * (1 + read())).backward()
            optimizer.step()


def test_what_each_step_sets_again_is_not_reported(tmp_path: Path) -> None:
    for hook in (in_a_dict, in_an_object, in_a_list_that_is_emptied, in_an_attribute, in_an_attribute_of_none):
        run = new_run(tmp_path / hook.__name__)
        run_ranks(train, 1, run.path, hook)
        assert told(run) == []


@pytest.mark.parametrize(
    "hook",
    [
        kept_in_a_dict,
        given_anyway,
        kept_where_an_error_says_that_there_is_none,
        kept_in_a_list,
        kept_in_an_attribute,
        kept_in_an_attribute_of_none,
    ],
)
def test_what_a_step_may_have_from_the_one_before_is_told(tmp_path: Path, hook: Callable[[nn.Module], Hooked]) -> None:
    run = new_run(tmp_path)
    run_ranks(train, 1, run.path, hook)
    message, *_ = told(run)  # a list is told by its own name, too
    assert message.startswith("training changes model.0.")
