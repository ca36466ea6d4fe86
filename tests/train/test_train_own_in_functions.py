"""What functions that give the loss carry outside of themselves is told; what they only count or show is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watched_loops import batches

from cluster_ddp.train.own.kept import KeptValues

MEAN, HISTORY, STATS = 1.0, [1.0], {"mean": 1.0, "calls": 0}
BANK = torch.zeros(100, 2)


def by_global(loss: torch.Tensor) -> torch.Tensor:
    global MEAN
    MEAN = 0.9 * MEAN + 0.1 * loss.item()
    return loss / MEAN


def by_attribute(loss: torch.Tensor) -> torch.Tensor:
    by_attribute.mean = 0.9 * by_attribute.mean + 0.1 * loss.item()  # type: ignore[attr-defined]
    return loss / by_attribute.mean  # type: ignore[attr-defined,no-any-return]


by_attribute.mean = 1.0  # type: ignore[attr-defined]


def by_list(loss: torch.Tensor) -> torch.Tensor:
    scaled = loss / np.mean(HISTORY)
    HISTORY.append(loss.item())
    return scaled


def by_item(loss: torch.Tensor) -> torch.Tensor:
    def average() -> float:
        STATS["mean"] = 0.9 * STATS["mean"] + 0.1 * loss.item()
        return STATS["mean"]

    STATS["calls"] += 1
    return loss / average()


def by_bank(loss: torch.Tensor) -> torch.Tensor:
    found = loss * BANK.sum()
    BANK[0] += loss.detach()
    return found


class ByClass:
    """Counts in its class."""

    calls = 1

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        ByClass.calls += 1
        return loss / ByClass.calls


class ByOther(nn.Module):
    """Calls a function that carries something."""

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return by_global(loss)


CALLS = 0


def only_counts(loss: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    only_counts.calls += 1  # type: ignore[attr-defined]
    if CALLS % 100 == 0:
        print(CALLS, only_counts.calls)  # type: ignore[attr-defined]
    mean = loss.mean()
    mean = mean * 2
    HISTORY.append(mean.item())
    return mean


only_counts.calls = 0  # type: ignore[attr-defined]


def calls(function: Any) -> Callable[[nn.Module, Any], None]:
    def loop(model: nn.Module, once: Any) -> None:
        for batch in once:
            loss = function(model(batch).square().mean())
            loss.backward()

    return loop


def by_enclosing(model: nn.Module, once: Any) -> None:
    mean = 1.0

    def scaled(loss: torch.Tensor) -> torch.Tensor:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss.item()
        return loss / mean

    for batch in once:
        loss = scaled(model(batch).square().mean())
        loss.backward()


def by_an_object_that_reads_what_comes_later(model: nn.Module, once: Any) -> None:
    class Scaled:
        def __init__(self) -> None:
            self.mean = 1.0

        def __call__(self, loss: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * loss.item()
            return loss / self.mean if self.mean > 0 else later

    scaled = Scaled()
    for batch in once:
        loss = scaled(model(batch).square().mean())
        loss.backward()
    later = torch.zeros(())


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (calls(by_global), ["change MEAN in by_global(),"]),
        (calls(by_attribute), ["change by_attribute.mean in by_attribute(),"]),
        (calls(by_list), ["change HISTORY in by_list(),"]),
        (calls(by_item), ["change STATS['mean'] in by_item(),"]),
        (calls(by_bank), ["change BANK in by_bank(),"]),
        (calls(ByClass()), ["change ByClass.calls in __call__(),"]),
        (calls(ByOther()), ["change MEAN in by_global(),"]),
        (calls(only_counts), []),
        (by_enclosing, ["change mean in scaled(),"]),
        (by_an_object_that_reads_what_comes_later, ["change scaled,"]),
    ],
)
def test_what_a_function_carries_into_the_loss_is_told(
    loop: Callable[[nn.Module, Any], None], names: list[str]
) -> None:
    messages: list[str] = []
    loop(nn.Linear(4, 2), batches(messages, None, KeptValues()))
    assert len(messages) == len(names) and all(name in message for name, message in zip(names, messages, strict=True))
