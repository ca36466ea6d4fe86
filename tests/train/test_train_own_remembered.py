"""What a batch or an epoch sets for later ones is told from the source."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched_loops import MODEL, twice


def changes_its_criterion(once: Any) -> None:
    criterion: nn.Module = nn.MSELoss()
    for epoch in range(3):
        if epoch == 1:
            criterion = nn.L1Loss()
        for batch in once():
            criterion(MODEL(batch), batch).backward()


def changes_what_its_criterion_holds(once: Any) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    for _ in range(3):
        for batch in once():
            criterion(MODEL(batch), batch.softmax(1)).backward()
        criterion.weight = torch.rand(4)


def begins_another_stage(once: Any) -> None:
    stage = "first"
    for _ in range(3):
        for batch in once():
            loss = MODEL(batch).square().mean()
            if stage == "first":
                if loss.item() < 0.01:
                    stage = "second"
            else:
                loss = loss + MODEL(batch).abs().mean()
            loss.backward()


def raises_a_weight_once_it_is_good(once: Any) -> None:
    beta = 0.1
    for _ in range(3):
        train(once, beta)
        if MODEL.weight.mean() > 9:
            beta = 1.0


def train(once: Any, weight: float) -> None:
    for batch in once():
        (weight * MODEL(batch).square().mean()).backward()


def lowers_its_rate_by_a_sum(once: Any) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(MODEL.parameters()))
    for _ in range(3):
        total = 0.0
        for batch in once():
            loss = MODEL(batch).mean()
            loss.backward()
            total += loss.item()
        mean = total / 2
        scheduler.step(mean)


def passes_it_to_a_step(once: Any) -> None:
    criterion: nn.Module = nn.MSELoss()
    for epoch in range(3):
        for batch in once():
            step(batch, epoch, criterion=criterion)
        if epoch == 1:
            criterion = nn.L1Loss()


def step(batch: Tensor, epoch: int, criterion: nn.Module) -> None:
    loss = criterion(MODEL(batch), batch)
    loss.backward()
    print(epoch)


class Trainer:
    """Keeps its weight itself."""

    weight = 1.0

    def train(self, once: Any) -> None:
        for batch in once():
            self.step(batch)

    def step(self, batch: Tensor) -> None:
        (self.weight * MODEL(batch).mean()).backward()


def sets_an_attribute_of_its_trainer(once: Any) -> None:
    trainer = Trainer()
    for epoch in range(3):
        trainer.train(once)
        if epoch == 1:
            trainer.weight = 0.5


def ends_by_its_losses(once: Any) -> None:
    losses: list[float] = []
    for _ in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
        losses.append(MODEL.weight.mean().item())
        if len(losses) > 2 and losses[-1] > losses[-2]:
            break


def lowers_its_own_rate(once: Any) -> None:
    rate = 2.0
    for _ in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
            for weight in MODEL.parameters():
                weight.data.add_(weight.grad, alpha=-rate)  # type: ignore[arg-type]
        if MODEL.weight.mean() > 9:
            rate /= 4


def lowers_the_rate_by_earlier_losses(once: Any) -> None:
    optimizer, losses = torch.optim.SGD(MODEL.parameters()), {"train": [1.0, 0.0]}
    for _ in range(3):
        for batch in once():
            loss = MODEL(batch).mean()
            loss.backward()
        losses["train"].append(loss.item())
        if losses["train"][-1] > losses["train"][-2]:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def prunes_by_masks(once: Any) -> None:
    masks: dict[str, Tensor] = {}
    for epoch in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
            with torch.no_grad():
                for name, weight in MODEL.named_parameters():
                    if name in masks:
                        weight.mul_(masks[name])
        if epoch == 1:
            masks = {name: weight.abs() > 0.1 for name, weight in MODEL.named_parameters()}


def clips_by_a_mean(once: Any) -> None:
    bound = 1.0
    for batch in once():
        MODEL(batch).mean().backward()
        norm = nn.utils.clip_grad_norm_(MODEL.parameters(), bound)
        bound = 0.9 * bound + 0.1 * norm.item()


def ends_by_its_best_losses(once: Any) -> None:
    best: list[float] = []
    for _ in range(3):
        loss = MODEL.weight.sum()
        for batch in once():
            loss = MODEL(batch).mean()
            loss.backward()
        heapq.heappush(best, loss.item())
        if best[0] < loss.item():
            break


def takes_tasks_in_turn(once: Any) -> None:
    tasks = itertools.cycle("aab")
    for batch in once():
        loss = MODEL(batch).mean()
        if next(tasks) == "b":
            loss = loss + MODEL(batch).abs().mean()
        loss.backward()


def uses_what_the_first_batch_sets(once: Any) -> None:
    for _ in range(3):
        for number, batch in enumerate(once()):
            if number == 0:
                anchor = batch
            (MODEL(batch) - MODEL(anchor)).square().mean().backward()


def begins_late_in_each_epoch(once: Any) -> None:
    weight = 0.0
    for _ in range(3):
        for number, batch in enumerate(once()):
            if number > 2:
                weight = 0.5
            (weight * MODEL(batch).mean()).backward()


TOLD: dict[Callable[[Any], None], str] = {
    begins_late_in_each_epoch: "weight",
    changes_its_criterion: "criterion",
    changes_what_its_criterion_holds: "criterion.weight",
    begins_another_stage: "stage",
    raises_a_weight_once_it_is_good: "beta",
    lowers_its_rate_by_a_sum: "total",
    passes_it_to_a_step: "criterion",
    sets_an_attribute_of_its_trainer: "trainer.weight",
    ends_by_its_losses: "losses",
    ends_by_its_best_losses: "best",
    lowers_its_own_rate: "rate",
    lowers_the_rate_by_earlier_losses: "losses['train']",
    prunes_by_masks: "masks",
    clips_by_a_mean: "bound",
    takes_tasks_in_turn: "tasks",
    uses_what_the_first_batch_sets: "anchor",
}


@pytest.mark.parametrize("loop", TOLD, ids=lambda loop: loop.__name__)
def test_what_later_batches_use_is_told(loop: Callable[[Any], None]) -> None:
    messages: list[str] = []
    loop(twice(messages))
    assert len(messages) == 1
    assert f" {TOLD[loop]}" in messages[0]
    assert "']=" not in messages[0]  # to be kept under a name


class WithTwoOfThem:
    """Holds a number that another watch reports, and what only the words of that report happen to name."""

    def __init__(self) -> None:
        self.bank, self.best = torch.zeros(4), 0.0

    def fit(self, once: Callable[[], Iterator[Tensor]]) -> None:
        loop = "warm"
        for _ in range(3):
            for batch in once():
                loss = (MODEL(batch) - self.bank).square().mean() * (1.0 if loop == "warm" else 2.0)
                loss.backward()
                self.bank.mul_(0.9).add_(batch.mean(0))
                if loss.item() > self.best:
                    self.best = loss.item()
                if loss.item() < 0.5:
                    loop = "main"


def test_what_is_told_does_not_hide_other_variables_of_which_its_words_remind() -> None:
    messages: list[str] = []
    WithTwoOfThem().fit(twice(messages))
    told = [
        message.partition(", which")[0].partition(", from which")[0].partition(" in one batch")[0]
        for message in messages
    ]
    assert told == ["the loop depends on self.best", "steps change self.bank", "the loop sets loop"]
