"""Optimizers of the zoo that keep things of their own beside their state."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.optim import (
    SGD,
)


class Around(SGD):
    """Keeps its momentum in an optimizer inside it, in a dict of its own, or for a parameter that it does not hold."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, kept: str) -> None:
        self.first, self.kept = parameters[0], kept
        super().__init__(parameters[kept == "state of what it does not hold" :], lr=lr)
        self.inner = SGD(parameters, lr=lr, momentum=0.9) if kept == "an optimizer in itself" else None
        self.momentum: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.inner is not None:
            self.inner.step()
            return
        if self.first.grad is not None:
            kept: dict[Any, Any] = self.momentum
            key: Any = self.first
            if self.kept == "state of what it does not hold":
                kept, key = self.state[self.first], "momentum"
            kept[key] = kept.get(key, 0) * 0.9 + self.first.grad
            self.first -= 0.01 * kept[key]
        super().step()


class Remembers(SGD):
    """Its updates depend on an attribute: `kind` says of which kind that is."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, kind: str) -> None:
        super().__init__(parameters, lr=lr)
        self.kind, self.word, self.before = kind, "first", None
        self.generator = torch.Generator()
        self.updates = {id(weight): 1 for weight in parameters if kind == "a number by the id of a parameter"}
        self.words: dict[Any, tuple[str, ...]] = {}
        self.numbers = [0.0] * (20_000 if kind == "a very long list in itself" else 200)
        self.iterator = iter(range(100)) if kind == "an iterator in itself" else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first: nn.Parameter = self.param_groups[0]["params"][0]
        if first.grad is None:  # of a layer that is frozen
            super().step()
            return
        gradient = first.grad.clone()
        if self.kind == "a generator in itself":
            first.grad += torch.randn(first.shape, generator=self.generator).to(first.device)
        elif self.kind == "a word in itself":
            first.grad *= len(self.word)
            self.word = "later"
        elif self.kind == "words by parameters in itself":
            self.words[first] = (*self.words.get(first, ()), "one more")
            first.grad *= len(self.words[first])
        elif self.kind == "a tensor that comes later":
            first.grad += gradient if self.before is None else self.before
            self.before = gradient
        elif self.kind == "a number that comes later":
            self.count = getattr(self, "count", 0) + 1
            first.grad *= self.count
        elif self.kind == "a number by the id of a parameter":
            self.updates[id(first)] += 1
            first.grad *= self.updates[id(first)]
        elif self.kind in ("a long list in itself", "a very long list in itself"):
            self.numbers[150] += 1
            first.grad *= self.numbers[150]
        elif self.iterator is not None:
            first.grad *= next(self.iterator)
        super().step()


class Holds(SGD):
    """Holds what none of its updates touches, and what an optimizer that is made again has at the same place."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.iterators = iter([1, 2]), iter(range(3)), itertools.count(4)
        self.numbers = [float("nan") for _ in range(200)]
        next(self.iterators[2])


class OnlyWrites(SGD):
    """Keeps something from each update that none of its methods reads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.before = float(self.param_groups[0]["params"][0].sum())


class RemembersLate(SGD):
    """Its updates depend on an attribute, called as what a GradScaler sets, that changes once, in the fifth.

    How many there were is in the group.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.grad_scale = 0
        self.param_groups[0]["updates"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["updates"] += 1
        self.grad_scale += group["updates"] == 5
        for parameter in group["params"]:
            if parameter.grad is not None:  # as that of a layer that is frozen
                parameter.add_(parameter.grad, alpha=-group["lr"] * (1 + self.grad_scale))


class Caches(SGD):
    """Two groups share a list of lists, which is a default, as the buffer of the RAdam of torch_optimizer is."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        first, *others = parameters
        super().__init__([{"params": [first]}, {"params": others}], lr=lr, momentum=0.9)
        self.defaults["cache"] = self.last = [[None, 0.0] for _ in range(3)]
        for group in self.param_groups:
            group["cache"] = self.last

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            cached: list[Any] = group["cache"][number]
            cached[:] = [number, cached[1] + 0.25 + self.last[0][1]]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad *= cached[1]
        super().step()
