"""Runs a loop in this process under the watches that read its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cluster_ddp.train.own import kept as own_kept
from cluster_ddp.train.own.watch.counts import watch_counts
from cluster_ddp.train.own.watch.in_loss import watch_in_loss
from cluster_ddp.train.own.watch.remembered import watch_remembered
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved

MODEL = nn.Linear(4, 4)


class Kept(own_kept.Kept):
    """What run.keep gives."""

    stage, step = "first", 0


def twice(messages: list[str]) -> Callable[[], Iterator[Tensor]]:
    """Epochs of two batches; the first looks at the loop around it after each."""
    kept = own_kept.KeptValues()
    kept.add({"mode": "first"})  # equal to a variable of one of the loops
    saved = Saved([MODEL], kept)
    report = Reported(messages.append)
    watches = [watch_counts(Saved(), report), watch_in_loss(saved, report), watch_remembered(saved, report)]

    def once() -> Iterator[Tensor]:
        for _ in range(2):
            yield torch.rand(3, 4)
            for watch in watches:
                next(watch, None)

    return once


def batches(messages: list[str], passed_in: Any, kept: own_kept.KeptValues) -> Iterator[Tensor]:
    """Two batches, and what looks at the loop after each."""
    saved = Saved([passed_in], kept)
    watches = [watch_in_loss(saved, Reported(messages.append)), watch_counts(saved, Reported(messages.append))]
    for _ in range(2):
        yield torch.rand(3, 4)
        for watch in watches:
            next(watch, None)
