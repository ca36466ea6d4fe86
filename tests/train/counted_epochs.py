"""Epochs whose batches look at the loop around them for counts."""

from __future__ import annotations

import time
from typing import Any

import torch

from cluster_ddp.train.own import kept
from cluster_ddp.train.own.watch.counts import watch_counts
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved


class Kept(kept.Kept):
    """What run.keep gives."""

    step = 0


def rate_of(step: int) -> float:
    return 1 / (step + 1)


def show(net: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(torch.zeros(2, 1))


def batches(messages: list[str], *handed: Any) -> Any:
    """Two epochs of three batches, which look at the loop after the second step of each."""

    def once() -> Any:
        for number in range(3):
            yield number
            if number == 1:
                list(watch_counts(Saved(handed), Reported(messages.append)))

    return once


class Trainer:
    """As minGPT has one, with a best loss and early stopping."""

    def __init__(self, state: Any = None) -> None:
        self.iter_num, self.best, self.state = 0, float("inf"), state

    def ends_by_a_limit(self, once: Any) -> None:
        self.iter_num = 0
        for _ in range(2):
            for _ in once():
                self.iter_num += 1
                if self.iter_num >= 5:
                    break

    def begins_at_the_place(self, once: Any, run: Any = Kept) -> None:
        self._run = run
        self.iter_num = self._run.step
        for _ in range(2):
            for _ in once():
                self.iter_num += 1
                if self.iter_num >= 5:
                    break

    def begins_there_by_another_name(self, once: Any, run: Any = Kept) -> None:
        self.cluster_run = run
        self.iter_num = self.cluster_run.step
        for _ in range(2):
            for _ in once():
                self.iter_num += 1
                if self.iter_num >= 5:
                    break

    def sets_the_rate(self, once: Any) -> None:
        rate = 0.0
        for _ in once():
            rate = rate_of(self.iter_num)
            self.iter_num += 1
        assert rate

    def shows_what_a_method_makes(self, once: Any) -> None:
        for _ in once():
            if self.iter_num % 500 == 0:
                self.show()
            self.iter_num += 1

    def show(self) -> None:
        show(self.state)
        self.state(torch.zeros(2, 1))

    def stops_early(self, once: Any) -> None:
        patience, seen, last = 0, 0.0, 0.0
        for epoch in range(2):
            total = 0.0
            for size in once():
                total += size
            seen += total
            if last == 0.0 or time.time() - last > 60:
                last = time.time()
            if total < self.best:
                self.best, patience = total, 0
            else:
                patience += 1
                if patience > 3:
                    break
            print(epoch, seen)

    def of_what_is_handed_over(self, once: Any) -> None:
        for _ in once():
            self.state.iter_num += 1
            if self.state.iter_num > 5:
                break
