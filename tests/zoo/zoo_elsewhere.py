"""What a user's code may keep in a module that has neither the task nor a part of the model in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Doubles(torch.autograd.Function):
    """Counts its calls in its class."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        Doubles.calls += 1
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def in_attribute() -> int:
    """Counts its calls in an attribute of its own."""
    count: int = getattr(in_attribute, "calls", 0) + 1
    in_attribute.calls = count  # type: ignore[attr-defined]
    return count


def in_default(counts: list[int] = [0]) -> int:  # noqa: B006 - this is what is to be seen
    """Counts its calls in the default of an argument."""
    counts[0] += 1
    return counts[0]


def _counter() -> Any:
    count = [0]

    def in_closure() -> int:
        count[0] += 1
        return count[0]

    return in_closure


in_closure = _counter()
levels = {"noise": 0.0}
names = ("noise", 1.0)
