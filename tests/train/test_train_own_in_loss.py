"""What a loop computes its loss from and steps change is told; what they only record is not."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watched_loops import batches

from cluster_ddp.train.own.kept import KeptValues


class Scaled:
    """Divides a loss by its running mean."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


class Centered:
    """The center of a teacher's outputs, as DINO has it."""

    def __init__(self) -> None:
        self.center, self.shown = torch.zeros(2), 0

    def update(self, outputs: torch.Tensor) -> None:
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        self.shown += 1


class Meter:
    """Only prints."""

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, value: float) -> float:
        self.total += value
        return self.total


class State(Scaled):
    """As it is passed in."""


def divides_by_an_object(model: nn.Module, once: Any, scaled: Any) -> None:
    for batch in once:
        loss = model(batch).square().mean()
        scaled_loss = scaled(loss)
        scaled_loss.backward()


def reads_an_attribute(model: nn.Module, once: Any) -> None:
    centered = Centered()
    for batch in once:
        outputs = model(batch)
        centered.update(outputs)
        loss = (outputs - centered.center).square().mean()
        loss.backward()


class Walk:
    """An environment like those of gymnasium."""

    def reset(self, *, seed: int | None = None) -> None:
        self.generator, self.at = np.random.default_rng(seed), 0.0

    def step(self, action: torch.Tensor) -> torch.Tensor:
        self.at += float(self.generator.normal())
        return action * self.at


def plays(model: nn.Module, once: Any, *, again: bool) -> None:
    env = Walk()
    env.reset(seed=0)
    for number, batch in enumerate(once):
        if again:
            env.reset(seed=number)
        loss = env.step(model(batch)).sum()
        loss.backward()


class Stroll(Walk):
    """Draws from the global generator, and may count its episodes."""

    def __init__(self, *, counts: bool = False) -> None:
        self.counts, self.episodes = counts, 0

    def reset(self) -> None:  # type: ignore[override]
        self.at = 0.0
        if self.counts:
            self.episodes += 1

    def step(self, action: torch.Tensor) -> torch.Tensor:
        self.at += float(np.random.normal())
        return action * self.at * (1 + self.episodes)


def strolls(model: nn.Module, once: Any, env: Stroll) -> None:
    for batch in once:
        env.reset()
        loss = env.step(model(batch)).sum()
        loss.backward()


def plays_anew(model: nn.Module, once: Any) -> None:
    env = Walk()
    for number, batch in enumerate(once):
        env.reset(seed=number)
        loss = env.step(model(batch)).sum()
        loss.backward()


def weighs_by_earlier_losses(model: nn.Module, once: Any) -> None:
    weights, losses = np.ones(3), collections.deque[float](maxlen=10)
    for batch in once:
        each = model(batch).square().mean(1)
        loss = (each * torch.tensor(weights)).mean()
        weights[:] = each.detach().numpy()
        if len(losses) > 1:
            loss = loss / sum(losses)
        losses.append(loss.item())
        loss.backward()


def sets_its_rate_by_earlier_losses(model: nn.Module, once: Any) -> None:
    optimizer, losses = torch.optim.SGD(model.parameters()), [1.0]
    for batch in once:
        loss = model(batch).square().mean()
        loss.backward()
        rate = 0.1 * sum(losses) / len(losses)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(loss.item())


def keeps_features(model: nn.Module, once: Any) -> None:
    bank, rows = torch.zeros(100, 2), torch.arange(3)
    for batch in once:
        features = model(batch)
        loss = (features @ bank.T).mean()
        loss.backward()
        bank[rows] = features.detach()


def perturbs(model: nn.Module, once: Any) -> None:
    delta = torch.zeros(3, 4, requires_grad=True)
    for batch in once:
        loss = model(batch + delta[: len(batch)]).square().mean()
        loss.backward()
        delta.data = (delta + 0.01 * delta.grad.sign()).clamp(-0.1, 0.1)  # type: ignore[union-attr]


def averages_tasks(model: nn.Module, once: Any) -> None:
    costs, weights = np.ones((2, 2)), np.ones((2, 2))
    for epoch in range(1):
        weights[:, epoch] = 2 * costs[0] / costs[0].sum()
        for batch in once:
            each = model(batch).square().mean(0)
            loss = (each * torch.tensor(weights[:, epoch])).sum()
            loss.backward()
            costs[epoch] += each.detach().numpy()


def fills_first(model: nn.Module, once: Any) -> None:
    inputs, noise, shown, totals = torch.zeros(3, 4), torch.zeros(3, 2), np.zeros(4), np.zeros(2)
    for number, batch in enumerate(once):
        inputs[: len(batch)] = batch
        noise.normal_()
        totals.fill(0)
        totals[0] += 1
        loss = (model(inputs) + noise).square().mean() * totals[0]
        loss.backward()
        shown[number] = loss.item()


def multiplies(model: nn.Module, once: Any) -> None:
    multiplier, mean = torch.tensor(1.0), 0.0
    for batch in once:
        loss = model(batch).square().mean()
        multiplier = (multiplier + loss.detach()).clamp(min=0)
        mean = 0.9 * mean + loss.item()
        total = loss * multiplier + mean
        total.backward()


def counts_labels(model: nn.Module, once: Any) -> None:
    counts = collections.Counter[int]()
    for batch in once:
        counts.update([0, 1, 1])
        weights = torch.tensor([1 / counts[0], 1 / counts[1]])
        loss = (model(batch).square() * weights).mean()
        loss.backward()


class Bar:
    """A progress bar of a library."""

    __module__ = "packaging"

    def __init__(self) -> None:
        self.n = 0

    def update(self) -> None:
        self.n += 1


def counts_by_a_bar(model: nn.Module, once: Any) -> None:
    bar, shown = Bar(), Bar()
    for batch in once:
        loss = model(batch).square().mean() * min(1.0, bar.n / 10)
        loss.backward()
        for each in (bar, shown):
            each.update()


def steps_by_a_metric(model: nn.Module, once: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    mean, scheduler = (
        torchmetrics.MeanMetric(),
        torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters())),
    )
    for _ in range(1):
        for batch in once:
            loss = model(batch).square().mean()
            loss.backward()
            mean.update(loss.detach())
        scheduler.step(mean.compute())


class Agent:
    """Runs its loop itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.model(batch).square().mean()

    def train(agent, once: Any) -> None:
        for batch in once:
            loss = agent.loss(batch)
            loss.backward()


def adds_parts(model: nn.Module, once: Any) -> None:
    parts: dict[str, Any] = {}
    values: dict[str, float] = {}
    for batch in once:
        for number, output in enumerate(model(batch)):
            parts[str(number)] = output.square().mean()
        values["sum"] = float(batch.sum())
        loss = sum(parts.values()) * values["sum"]
        loss.backward()


def only_prints(model: nn.Module, once: Any) -> None:
    meter, losses, mean, loss, other = Meter(), [], 0.0, torch.tensor(0.0), torch.tensor(0.0)
    summed: Any = 0
    for number, batch in enumerate(once):
        if number % 5 == 0:
            other = model(batch).mean()
            other.backward()
        loss = model(batch).square().mean()
        mean = 0.9 * mean + loss.item()
        losses.append(loss.item())
        print(meter.add(loss.item()), mean, np.mean(losses), other.item())
        summed = summed + loss
        if number % 1 == 0:
            summed.backward()
            summed = 0


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (lambda model, once: divides_by_an_object(model, once, Scaled()), ["change scaled,"]),
        (reads_an_attribute, ["change centered,"]),
        (lambda model, once: plays(model, once, again=False), ["change env,"]),
        (lambda model, once: plays(model, once, again=True), ["change env,"]),
        (plays_anew, []),
        (lambda model, once: strolls(model, once, Stroll()), []),
        (lambda model, once: strolls(model, once, Stroll(counts=True)), ["change env,"]),
        (weighs_by_earlier_losses, ["change losses, weights,"]),
        (sets_its_rate_by_earlier_losses, ["change losses,"]),
        (keeps_features, ["change bank,"]),
        (perturbs, ["change delta,"]),
        (averages_tasks, ["change costs,"]),
        (fills_first, []),
        (multiplies, ["depends on mean, multiplier,"]),
        (only_prints, []),
        (adds_parts, []),
        (counts_labels, ["change counts,"]),
        (counts_by_a_bar, ["change bar,"]),
        (steps_by_a_metric, ["change mean,"]),
        (lambda model, once: Agent(model).train(once), []),
    ],
)
def test_what_goes_into_the_loss_is_told(loop: Callable[[nn.Module, Any], None], names: list[str]) -> None:
    messages: list[str] = []
    loop(nn.Linear(4, 2), batches(messages, None, KeptValues()))
    assert len(messages) == len(names) and all(name in message for name, message in zip(names, messages, strict=True))


def test_what_is_saved_is_not_told() -> None:
    messages, kept, state = list[str](), KeptValues(), State()
    divides_by_an_object(nn.Linear(4, 2), batches(messages, state, kept), state)
    divides_by_an_object(nn.Linear(4, 2), batches(messages, None, kept), nn.Sequential())
    assert messages == []
