"""Numbers that decide, and that a function outside of the running loop sets, are told; those of meters are not."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR

from cluster_ddp.train.own import kept
from cluster_ddp.train.own.watch.elsewhere import watch_elsewhere
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved
from cluster_ddp.train.own.watch.schedulers import watch_schedules


class Trainer:
    """Validates in a method of its own."""

    def __init__(self) -> None:
        self.best, self.seen = float("inf"), 0

    def validate(self, loss: float) -> None:
        self.seen += 1
        if loss < self.best:
            self.best = loss
            print("the best so far")


class Saver:
    """Is called with the newest value."""

    best: float | None

    def __init__(self) -> None:
        self.best = None

    def __call__(self, value: float) -> None:
        if self.best is None or value > self.best:
            self.best = value


class KeptSaver(Saver):
    """Passed in by the program."""


def saves_the_best(value: float, state: dict[str, Any]) -> None:
    if value > state["best"]:
        state["best"] = value


def notes_the_best(value: float) -> None:
    global best_at_the_top
    best_at_the_top = max(best_at_the_top, value)


best_at_the_top = best_below_if = 0.0
if best_below_if == 0.0:  # as most scripts have one to find out whether they are imported

    def notes_the_best_below_if(value: float) -> None:
        global best_below_if
        if value > best_below_if:
            best_below_if = value


steps_done = rates_given = 0


def falling_rate() -> float:
    global rates_given
    rates_given += 1
    return 0.1 / rates_given


def lowers_the_rate(group: dict[str, Any]) -> None:
    rate = falling_rate()
    group["lr"] = rate


def explores() -> bool:
    """As in PyTorch's tutorial on DQN."""
    global steps_done
    steps_done += 1
    return random.random() > 0.05 + 0.85 * math.exp(-1.0 * steps_done / 1000)


class Agent:
    """Explores less with each step."""

    def __init__(self) -> None:
        self.epsilon, self.acted = 1.0, 0

    def act(self) -> int:
        self.acted += 1
        self.epsilon *= 0.9
        return 0 if random.random() < self.epsilon else 1


class Warmup:
    """Sets the rate, as the optimizer of the Annotated Transformer does."""

    def __init__(self) -> None:
        self.group, self.steps = {"lr": 0.0}, 0

    def step(self) -> None:
        self.steps += 1
        self.group["lr"] = self.rate()

    def rate(self, step: int | None = None) -> float:
        step = self.steps if step is None else step
        return 0.1 * step


class Falling:
    """Gives a rate that falls with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 0.1 * (1 - self.calls / 1000)


class PerEpoch(Falling):
    """Is called before the batches, and so not in the first two steps."""


class OfStep:
    """Gives the rate of a step, and counts its calls."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return 0.1 * (1 - step / 1000)


def sets_rates(schedule: Any, of_step: OfStep, group: dict[str, float]) -> None:
    rate = schedule()
    group["lr"] = rate
    group["lr"] = of_step(1)


class Annealed:
    """A loss that weighs a part of it more with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return min(1.0, self.calls / 1000)


class Meter:
    """As programs have it."""

    def __init__(self) -> None:
        self.total = self.count = self.last = self.shown = 0.0
        self.batches, self.every = 0, 10
        self.reset()

    def reset(self) -> None:
        self.longest = 0.0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        if self.count > 0:
            self.last = self.total / max(self.count, 1)
        if value > self.longest:
            self.longest = value
        if self.count - self.shown >= 3:
            self.shown = self.count
        self.batches += 1
        if self.batches >= self.every:
            print("the mean", self.last)
            self.batches = 0


def loop(step: Callable[[], Any], watch: Iterator[None], **held: Any) -> None:
    """Two steps of a loop that holds these things."""
    for _ in range(2):
        step()
        next(watch, None)
    assert held is not None


def told(step: Callable[..., Any], *passed_in: Any, **held: Any) -> str:
    messages: list[str] = []
    values = kept.KeptValues()
    if "kept" in held:
        values.add({"kept": held["kept"]})
    loop(lambda: step(*held.values()), watch_elsewhere(Saved(passed_in, values), Reported(messages.append)), **held)
    return "".join(messages)


@pytest.mark.parametrize(
    ("step", "held", "name"),
    [
        (lambda trainer: trainer.seen, {"trainer": Trainer()}, "held['trainer'].best"),
        (lambda saver: saver, {"saver": Saver()}, "held['saver'].best"),
        (lambda state: state, {"state": {"best": 0.0}}, "held['state']['best']"),
        (lambda state: state, {"state": {"best": torch.tensor(0.5)}}, "held['state']['best']"),
        (lambda state: state, {"state": {"best": np.float32(0.5)}}, "held['state']['best']"),
        (lambda warmup: warmup.step(), {"warmup": Warmup()}, "held['warmup'].steps"),
        (lambda schedule: sets_rates(schedule, OfStep(), {}), {"schedule": Falling()}, "held['schedule'].calls"),
        (lambda schedule: schedule, {"schedule": PerEpoch()}, "held['schedule'].calls"),
        (lambda loss: loss(), {"loss": Annealed()}, "held['loss'].calls"),
        (lambda agent: agent.act(), {"agent": Agent()}, "held['agent'].epsilon"),
    ],
)
def test_a_number_that_decides_elsewhere_is_told(step: Any, held: dict[str, Any], name: str) -> None:
    message = told(step, **held)
    assert f"{name}" in message and "which no checkpoint contains" in message
    assert "best_at_the_top, best_below_if" in message  # on which any program that holds this module depends


def test_calls_that_a_schedule_only_counts_are_not_told() -> None:
    message = told(lambda of_step: sets_rates(float, of_step, {}), of_step=OfStep())
    assert "of_step" not in message


def test_a_proxy_that_cannot_be_looked_at_hides_nothing_else() -> None:
    message = told(lambda *_: None, proxy=Proxy(), trainer=Trainer())
    assert "held['trainer'].best" in message


class Proxy:
    """As of an object that does not exist yet."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("there is nothing behind it yet")


def test_what_a_step_only_counts_is_not_told_and_a_formula_of_it_is() -> None:
    assert "steps_done" not in told(lambda: None)
    assert "steps_done" in told(explores)


def test_a_rate_that_a_function_gives_by_a_count_at_the_top_is_told() -> None:
    assert "rates_given" in told(lambda: lowers_the_rate({}))


def test_a_decorated_function_that_runs_is_left_to_the_watch_on_running_functions() -> None:
    messages: list[str] = []
    decorated(watch_elsewhere(Saved(), Reported(messages.append)), 1.0, {"of decorated": 0.0})
    assert "best_at_the_top" in messages[0] and "of decorated" not in messages[0]


def as_it_is(function: Any) -> Any:
    return function


@as_it_is
def decorated(watch: Iterator[None], value: float, state: dict[str, float]) -> None:
    for _ in range(2):
        if value > state["of decorated"]:
            state["of decorated"] = value
        next(watch, None)


def test_what_a_callback_sets_in_the_function_around_it_is_told() -> None:
    messages: list[str] = []
    best, shown = 0.0, 0

    def at_the_end_of_a_batch(value: float) -> None:
        nonlocal best, shown
        shown += 1
        if value > best:
            best = value

    loop(lambda: at_the_end_of_a_batch(1.0), watch_elsewhere(Saved(), Reported(messages.append)))
    assert "depends on best, " in messages[0] and "shown" not in messages[0]
    assert (best, shown) == (1.0, 2)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_what_is_installed_for_a_user_is_not_taken_for_the_program(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install --user``, modules of a cluster in PYTHONPATH, and Debian's packages."""
    (tmp_path / folder).mkdir()
    code = "class Bar:\n    best = 0\n    def update(self, n):\n        if n > self.best:\n            self.best = n\n"
    (tmp_path / folder / "bars_of_others.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    bar = importlib.import_module("bars_of_others").Bar()
    bar.update(1)
    assert "bar" not in told(lambda bar: bar.update(2), bar=bar)


def test_a_meter_and_what_is_kept_otherwise_are_not_told() -> None:
    meter, saver = Meter(), KeptSaver()
    message = told(lambda meter, saver: meter.update(1.0), saver, meter=meter, saver=saver)
    assert "meter" not in message and "saver" not in message
    assert "['best']" not in told(lambda state: state, kept={"best": 0.0})


def counts_in_a_list() -> Callable[[int], float]:
    calls = [0]

    def rate(_: int) -> float:
        calls[0] += 1
        return 0.9 ** calls[0]

    return rate


def counts_in_a_variable() -> Callable[[int], float]:
    factor = 1.0

    def rate(_: int) -> float:
        nonlocal factor
        factor = factor * 0.9
        return factor

    return rate


def counts_in_an_iterator() -> Callable[[int], float]:
    calls = itertools.count()
    return lambda _: 0.9 ** next(calls)


def counts_in_an_object() -> Callable[[int], float]:
    class Schedule:
        calls = 0

        def rate(self, _: int) -> float:
            self.calls += 1
            return 0.9**self.calls

    return Schedule().rate


def counts_what_is_kept() -> Callable[[int], float]:
    values = kept.KeptValues().add({"calls": 0})

    def rate(_: int) -> float:
        values.calls += 1
        return float(0.9**values.calls)

    return rate


def remembers_what_it_gave() -> Callable[[int], float]:
    given: dict[int, float] = {}

    def rate(epoch: int) -> float:
        factor = 1.0
        for _ in range(epoch):
            factor *= 0.9
        given[epoch] = factor
        return given[epoch]

    return rate


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (counts_in_a_list, "calls"),
        (counts_in_a_variable, "factor"),
        (counts_in_an_iterator, "calls"),
        (counts_in_an_object, "self.calls"),
        (counts_what_is_kept, None),
        (remembers_what_it_gave, None),
        (lambda: lambda epoch: 0.9**epoch, None),
    ],
)
def test_a_schedule_that_counts_its_own_calls_is_told(make: Any, name: str | None) -> None:
    """Long before the scheduler is stepped, also where it is inside another."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = LambdaLR(optimizer, make())
    inside = SequentialLR(optimizer, [ConstantLR(optimizer), schedule], milestones=[2])
    messages: list[str] = []
    list(watch_schedules(Saved([inside]), messages.append))
    alone: list[str] = []
    list(watch_schedules(Saved([schedule]), alone.append))
    assert alone == messages
    if name is None:
        assert messages == []
        return
    assert len(messages) == 1 and f" each call of which changes {name} from its previous value" in messages[0]
