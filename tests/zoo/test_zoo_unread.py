"""What each step sets before it reads it, or loading makes again, is not told; what a step before has set is."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine
from zoo_models import CLASSES, FEATURES
from zoo_told import told
from zoo_training import Case, ZooTask

from cluster_ddp.train.state.unread import is_set_first


class Anneals(ZooTask):
    """Computes two weights in each step from a count that it saves, and the means of the batch."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.count, self.annealed, self.annealed_late = 0, 1.0, 1.0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.count += 1
        loss = super().loss(model, batch)
        self.annealed, self.means_of_batch = 1 / self.count, batch[0].mean(0)
        if self.count > 2:
            self.annealed_late = 2 / self.count
            loss = loss * self.annealed_late
        return loss * self.annealed + 0.0 * self.means_of_batch.sum()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_numbers_that_each_step_sets_before_it_reads_them_are_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(Anneals, tmp_path, capfd, steps=4) == []


class Tempered(nn.Linear):
    """Computes a temperature from a count that is its extra state, and notes in each pass how its scores spread."""

    count, temperature = 0, 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += self.training
        self.temperature = 1 / (1 + self.count)
        scores: Tensor = super().forward(inputs) * self.temperature
        self.spread = scores.std().item()
        return scores

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, count: int) -> None:
        self.count, self.temperature = count, 1 / (1 + count)


class MakesAgain(ZooTask):
    """Restores by a count where a sequence of points is, and a level that workers would share."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.points, self.level = SobolEngine(1, scramble=True, seed=1), multiprocessing.Value("d", 0.0)

    def model(self) -> nn.Module:
        self.tempered = Tempered(FEATURES, CLASSES)
        return self.tempered

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch) + self.points.draw(1).item() + self.tempered.spread
        self.level.value = self.points.num_generated / 2  # type: ignore[attr-defined]
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.points.num_generated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points.reset()
        self.points.fast_forward(state["drawn"])
        self.level.value = state["drawn"] / 2  # type: ignore[attr-defined]


def test_what_loading_makes_again_from_a_count_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(MakesAgain, tmp_path, capfd, steps=4) == []


class BeginsMeans(ZooTask):
    """Forgets running means that its first step begins, although no later one could do without."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.count, self.of_none, self.parts = 0, None, dict[str, Any]()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss, mean = super().loss(model, batch), batch[0].mean(0)
        if self.count == 0:
            self.of_tensor, self.of_number, self.parts["mean"] = mean, mean.sum().item(), mean
        else:
            self.of_tensor = 0.9 * self.of_tensor + 0.1 * mean
            self.of_number = 0.9 * self.of_number + 0.1 * mean.sum().item()
            self.parts["mean"] = 0.9 * self.parts["mean"] + 0.1 * mean
        self.of_none = mean if self.count == 0 else 0.9 * self.of_none + 0.1 * mean
        self.count += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_mean_that_the_first_step_begins_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert told(BeginsMeans, tmp_path, capfd) == ["task.of_none", "task.of_number", "task.of_tensor", "task.parts"]


def dim_zero_sum(states: Tensor) -> Tensor:
    return states.sum(0)


def dim_zero_mean(states: Tensor) -> Tensor:
    return states.mean(0)


class Metric(nn.Module):
    """As those of torchmetrics: its state_dict() lacks how often it was updated, by which it weighs only means."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._update_count, self._reductions = 0, {"state": how}
        self.register_buffer("state", torch.zeros(()))

    def update(self, value: Tensor) -> None:
        self._update_count += 1
        self.state += value


class Measures(ZooTask):
    """Saves metrics by their state_dict(), one of them in a collection."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.sum, self.mean = nn.ModuleList([Metric(dim_zero_sum)]), Metric(dim_zero_mean)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        for metric in (*self.sum, self.mean):
            metric.update(loss.detach().cpu())
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum.state_dict(), "mean": self.mean.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum.load_state_dict(state["sum"])
        self.mean.load_state_dict(state["mean"])


def test_how_often_a_metric_was_updated_is_told_only_if_the_next_update_depends_on_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Metric, "__module__", "torchmetrics.metric")
    assert told(Measures, tmp_path, capfd) == ["task.mean"]


class Sets:
    """Methods that read an attribute, called like the method, in the call in which they set it."""

    part: Any
    parts: list[Any]

    def both_branches(self, step: int) -> float:
        if step:
            self.of_both_branches = 1.0
        else:
            self.of_both_branches = 2.0
        return self.of_both_branches

    def block(self, step: int) -> float:
        with contextlib.nullcontext():
            self.of_block, other = 1.0, step
        return self.of_block + other

    def inner_loop(self, step: int) -> float:
        for number in range(step):
            self.of_inner_loop = number
            step += self.of_inner_loop
        return step

    def inside(self, step: int) -> float:
        self.part.inner.of_inside = 1.0
        return self.part.inner.of_inside + step

    def element(self, step: int) -> float:
        self.parts[0].of_element = 1.0
        return self.parts[0].of_element + step


class MayNotSet:
    """The same, but they may read what an earlier call has left there."""

    part: Any
    parts: list[Any]

    def one_branch(self, step: int) -> float:
        if step:
            self.of_one_branch = 1.0
        return self.of_one_branch

    def itself(self, step: int) -> float:
        self.of_itself = self.of_itself + step if step else 1.0
        return self.of_itself

    def loop(self, step: int) -> float:
        for number in range(step):
            self.of_loop = number
        return self.of_loop

    def attempt(self, step: int) -> float:
        try:
            self.of_attempt = 1 / step
        except ZeroDivisionError:
            step += 1
        return self.of_attempt

    def suppressed(self, step: int) -> float:
        with contextlib.suppress(ZeroDivisionError):
            self.of_suppressed = 1 / step
        return self.of_suppressed

    def later(self, step: int) -> Callable[[], float]:
        self.of_later = step
        return lambda: self.of_later

    def another(self, other: MayNotSet) -> float:
        self.of_another = 1.0
        return other.of_another

    def other_inside(self, other: Any) -> float:
        self.part.inner.of_other_inside = 1.0
        self.part = other
        return self.part.inner.of_other_inside

    def element_by_step(self, step: int) -> float:
        self.parts[step].of_element_by_step = 1.0
        step += 1
        return self.parts[step].of_element_by_step

    def elsewhere(self) -> float:
        self.of_elsewhere = 1.0
        return self.of_elsewhere + self.there()

    def there(self) -> float:
        return self.of_elsewhere

    def string(self) -> float:
        self.of_string = 1.0
        return self.of_string + float(getattr(self, "of_string"))  # noqa: B009

    def nowhere(self) -> None:
        self.of_nowhere = 1.0


@pytest.mark.parametrize("kind", [Sets, MayNotSet])
def test_whether_an_attribute_is_set_before_it_is_read(kind: type) -> None:
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name != "there"}
    assert {name: is_set_first(kind, f"of_{name}") for name in methods} == dict.fromkeys(methods, kind is Sets)
